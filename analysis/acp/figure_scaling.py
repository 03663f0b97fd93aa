"""Training throughput against the number of GPUs, and how far it is from growing as they do."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from .. import drawing, style
from ..tables import one_each

SETTING = ["architecture", "size", "context_length_tokens", "vocab_size"]
OFFICIAL = "official"
DASHES = {"acp": "-", "exact": "--"}
MODES = {"ddp": ("DDP", "o"), "fsdp": ("FSDP2", "s"), "none": ("one process", "o")}


def of_linear(records: pd.DataFrame) -> pd.DataFrame:
    """``training_step`` records of this project with ``of_linear``: the rate over that of the fewest GPUs of
    the same setting and method, times their share of the GPUs. One GPU has no mode of several."""
    ours = records[records["implementation"] != OFFICIAL].sort_values("ranks", kind="stable")
    one_each(ours, [*SETTING, "method", "ranks", "parallel"], "training_step")
    each = ours["throughput_tokens_per_s"] / ours["ranks"]
    first = each.groupby([ours[name] for name in (*SETTING, "method")]).transform("first")
    return ours.assign(of_linear=each / first)


def draw(records: pd.DataFrame) -> drawing.Figure:
    """The share of linear growth against the number of GPUs, a panel a setting.

    Args:
        records: ``training_step`` records of one suite; what was measured on one GPU alone is left out
            where there is more.
    """
    ours = of_linear(records)
    grown = ours.groupby(SETTING)["ranks"].transform("max") > 1
    settings = list((ours[grown] if grown.any() else ours).groupby(SETTING, sort=False))
    figure, axes = drawing.panels(len(settings), 2.5, sharey=True, squeeze=False)
    for ax, (setting, rows) in zip(axes[0], settings, strict=True):
        for (method, mode), curve in _curves(rows):
            name, marker = MODES[mode]
            look = {"color": style.SIZES[method != "acp"], "ls": DASHES[method], "marker": marker}
            label = f"{'ACP' if method == 'acp' else method}, {name}"
            ax.plot(curve["ranks"], 100 * curve["of_linear"], label=label, **look)
        ax.set_title(_in_words(setting))
        ax.axhline(100, color=style.PAPER, lw=1, zorder=0)
        drawing.powers_of_two(ax, sorted(rows["ranks"].unique()))
        ax.set_xlabel("processes, one a GPU")
    axes[0, 0].set(
        ylabel="share of linear growth (%), axis cut", ylim=(min(70, 100 * ours["of_linear"].min() - 5), 105)
    )
    drawing.legend(figure)
    return figure


def _curves(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str], pd.DataFrame]]:
    """((method, mode), rows by ranks) of one setting; every mode begins at the single process."""
    several = rows["ranks"] > 1
    for method, same in rows.groupby("method", sort=False):
        for mode in sorted(same.loc[several, "parallel"].unique()) or ["none"]:
            yield (method, mode), same[(same["ranks"] == 1) | (same["parallel"] == mode)]


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["training_step"]
    ours, first = of_linear(records), records.iloc[0]
    several = ours[(ours["method"] == "acp") & (ours["ranks"] > 1)]
    shares = " and ".join(
        f"{style.span(100 * share)} %{' of linear growth' * (place == 0)} on {ranks} GPUs"
        for place, (ranks, share) in enumerate(several.groupby("ranks")["of_linear"])
    )
    baselines = records.query("implementation == @OFFICIAL")
    pruned = style.span(100 * ours["pruned_ratio"].dropna())
    grows = f" With ACP, training reaches {shares}." if shares else ""
    beside = _against(baselines, ours)
    caption = f"""**Training on several GPUs.**{grows} These are whole training steps of this project on
random tokens. The weights are new, and the gates are set so that ACP prunes {pruned} % of the blocks. Each
GPU has one process, and each process takes equally many tokens. Times are medians of {first["repeats"]} times
{first["steps"]} steps. {beside}"""
    return draw(records), caption


def _in_words(setting: tuple) -> str:
    architecture, size, length, words = setting
    return f"{size} ({architecture}) at {style.length_label(length)}, vocabulary {words:,}"


def _against(baselines: pd.DataFrame, ours: pd.DataFrame) -> str:
    """The rates on one GPU beside those of the authors' model, as a sentence; empty if not timed."""
    both = baselines.merge(ours[ours["ranks"] == 1], on=[*SETTING, "method"], suffixes=("", "_ours"))
    times = both["throughput_tokens_per_s_ours"] / both["throughput_tokens_per_s"]
    rate = style.span(times, ".2f") if len(both) else ""
    return rate and f"On one GPU, the rate is {rate} times that of the authors' model in the same run."
