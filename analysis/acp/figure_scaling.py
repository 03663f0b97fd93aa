"""Training throughput against the number of GPUs, and how far it is from growing as they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from ..tables import one_each

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTING = ["architecture", "size", "context_length_tokens", "vocab_size"]
OFFICIAL = "official"
DASHES = {"acp": "-", "exact": "--"}
MARKERS = {"ddp": "o", "fsdp": "s"}
MODES = {"ddp": "DDP", "fsdp": "FSDP2"}


def of_linear(records: pd.DataFrame) -> pd.DataFrame:
    """``training_step`` records of this project with ``of_linear``: the rate over that of the fewest GPUs of
    the same setting and method, times their share of the GPUs. One GPU has no mode of several."""
    ours = records[records["implementation"] != OFFICIAL].sort_values("ranks", kind="stable")
    one_each(ours, [*SETTING, "method", "ranks", "parallel"], "training_step")
    each = ours["throughput_tokens_per_s"] / ours["ranks"]
    first = each.groupby([ours[name] for name in (*SETTING, "method")]).transform("first")
    return ours.assign(of_linear=each / first)


def draw(records: pd.DataFrame) -> Figure:
    """Tokens a second, and the share of linear growth, both against the number of GPUs.

    Args:
        records: ``training_step`` records of one suite; what was measured on one GPU alone is left out
            where there is more.
    """
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator

    ours = of_linear(records)
    grown = ours.groupby(SETTING)["ranks"].transform("max") > 1
    ours = ours[grown] if grown.any() else ours
    figure, (rate, share) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 2.6), layout="constrained")
    for index, (setting, rows) in enumerate(ours.groupby(SETTING, sort=False)):
        for (method, mode), curve in _curves(rows):
            look = {"color": style.SIZES[index % len(style.SIZES)], "linestyle": DASHES[method]}
            look |= {"marker": MARKERS.get(mode, "o"), "markersize": 3, "linewidth": 1.4}
            label = f"{_in_words(setting)}, {'ACP' if method == 'acp' else method}"
            label += f", {MODES[mode]}" if mode in MODES else ""
            rate.plot(curve["ranks"], curve["throughput_tokens_per_s"] / 1e3, label=label, **look)
            share.plot(curve["ranks"], 100 * curve["of_linear"], **look)
    share.axhline(100, color=style.PAPER, linewidth=1, zorder=0)
    rate.set_title("Thousand tokens a second")
    share.set_title("Share of linear growth (%)")
    shares = 100 * ours["of_linear"]
    share.set_ylim(min(50, shares.min() - 5), max(105, shares.max() + 5))
    rate.set_ylim(0)
    ranks = sorted(ours["ranks"].unique())
    for ax in (rate, share):
        ax.set_xscale("log", base=2)
        ax.set_xticks(ranks, [str(n) for n in ranks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("processes")
    figure.legend(loc="outside right center")
    return figure


def _curves(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str], pd.DataFrame]]:
    """((method, mode), rows by ranks) of one setting; every mode begins at the single process."""
    several = rows["ranks"] > 1
    for method, same in rows.groupby("method", sort=False):
        for mode in sorted(same.loc[several, "parallel"].unique()) or ["none"]:
            yield (method, mode), same[(same["ranks"] == 1) | (same["parallel"] == mode)]


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["training_step"]
    ours, first = of_linear(records), records.iloc[0]
    several = ours[(ours["method"] == "acp") & (ours["ranks"] > 1)]
    shares = " and ".join(
        f"{style.span(100 * share)} %{' of linear growth' * (place == 0)} on {ranks} GPUs"
        for place, (ranks, share) in enumerate(several.groupby("ranks")["of_linear"])
    )
    rivals = records.query("implementation == @OFFICIAL")
    pruned = style.span(100 * ours["pruned_ratio"].dropna())
    grows = f" With ACP, training reaches {shares}." if shares else ""
    beside = _against(rivals, ours)
    caption = f"""**Training on several GPUs.**{grows} These are whole training steps of this project on
random tokens. The weights are new, and the gates are set so that ACP prunes {pruned} % of the blocks. Each
GPU has one process, and each process takes equally many tokens. Times are medians of {first["repeats"]} times
{first["steps"]} steps. {beside}{style.provenance(records)}"""
    return draw(records), caption


def _in_words(setting: tuple) -> str:
    architecture, size, length, words = setting
    return f"{size} ({architecture}) at {style.length_label(length)}, vocabulary {words:,}"


def _against(rivals: pd.DataFrame, ours: pd.DataFrame) -> str:
    """The rates on one GPU beside those of the authors' model, a sentence a setting."""
    alone = ours[ours["ranks"] == 1]
    both = rivals.merge(alone, on=[*SETTING, "method"], suffixes=("", "_ours"))
    both["times"] = both["throughput_tokens_per_s_ours"] / both["throughput_tokens_per_s"]
    if both.empty:
        return ""
    said = [
        f"On one GPU, the rate is {style.span(both['times'], '.2f')} times that of the authors' model in the "
        "same run."
    ]
    for setting, rows in both.groupby(SETTING, sort=False):
        ratios = " and ".join(
            f"{row.times:.2f} {'with ACP' if row.method == 'acp' else row.method}"
            for row in rows.itertuples()
        )
        said.append(f"{_in_words(setting)}: {ratios}.")
    return " ".join([*said, ""])
