"""Training throughput against the number of GPUs, and how far it is from growing as they do."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each

SETTING = ["architecture", "size", "context_length_tokens", "vocab_size"]
OFFICIAL = "official"
MODES = {"ddp": "DDP", "fsdp": "FSDP2", "none": "one process"}


def of_linear(records: pd.DataFrame) -> pd.DataFrame:
    """``training_step`` records of this project with ``of_linear``: the rate over that of the fewest GPUs of
    the same setting and method, times their share of the GPUs. One GPU has no mode of several."""
    ours = records[records["implementation"] != OFFICIAL].sort_values("ranks", kind="stable")
    one_each(ours, [*SETTING, "method", "ranks", "parallel"], "training_step")
    each = ours["throughput_tokens_per_s"] / ours["ranks"]
    first = each.groupby([ours[name] for name in (*SETTING, "method")]).transform("first")
    return ours.assign(of_linear=each / first)


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row per setting, method, mode and number of GPUs.

    Args:
        records: ``training_step`` records of one suite; a setting that was measured on one GPU alone is left
            out if others were measured on several.
    """
    ours = of_linear(records)
    grown = ours.groupby(SETTING)["ranks"].transform("max") > 1
    ours = (ours[grown] if grown.any() else ours).sort_values([*SETTING, "method"], kind="stable")
    values = ours[[*SETTING, "method", "parallel", "ranks", "throughput_tokens_per_s", "of_linear"]]
    shown = pd.DataFrame(
        {
            "model": [_in_words(setting) for setting in values[SETTING].itertuples(index=False, name=None)],
            "method": values["method"].str.replace("acp", "ACP"),
            "mode": values["parallel"].map(MODES).to_list(),
            "GPUs": values["ranks"].map(str),
            "tokens/s": values["throughput_tokens_per_s"].map("{:,.0f}".format),
            "of linear growth": values["of_linear"].map("{:.1%}".format),
        }
    )
    return drawing.Table(shown, values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
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
    return tabulate(records), caption


def _in_words(setting: tuple) -> str:
    architecture, size, length, words = setting
    return f"{size} ({architecture}), {style.length_label(length)}, vocabulary {words:,}"


def _against(baselines: pd.DataFrame, ours: pd.DataFrame) -> str:
    """The rates on one GPU beside those of the authors' model, as a sentence; empty if not timed."""
    both = baselines.merge(ours[ours["ranks"] == 1], on=[*SETTING, "method"], suffixes=("", "_ours"))
    times = both["throughput_tokens_per_s_ours"] / both["throughput_tokens_per_s"]
    rate = style.span(times, ".2f") if len(both) else ""
    return rate and f"On one GPU, the rate is {rate} times that of the authors' model in the same run."
