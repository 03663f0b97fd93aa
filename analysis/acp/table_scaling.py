"""Training throughput on several GPUs, and its ratio to linear scaling."""

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import naming

SETTING = ["architecture", "size", "context_length_tokens", "vocab_size"]
OFFICIAL = "official"
MODES = {"ddp": "DDP", "fsdp": "FSDP2", "none": "one process"}


def of_linear(records: pd.DataFrame) -> pd.DataFrame:
    """``training_step`` records of this project with ``of_linear``: the throughput per GPU over the
    throughput per GPU on the fewest GPUs of the same setting and method."""
    ours = records[records["implementation"] != OFFICIAL].sort_values("ranks", kind="stable")
    one_each(ours, [*SETTING, "method", "ranks", "parallel"], "training_step")
    each = ours["throughput_tokens_per_s"] / ours["ranks"]
    first = each.groupby([ours[name] for name in (*SETTING, "method")]).transform("first")
    return ours.assign(of_linear=each / first)


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """One row per setting, method, mode and number of GPUs.

    Args:
        records: ``training_step`` records of one suite; settings measured on one GPU are left out if other
            settings were measured on several GPUs.
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
            "of linear scaling": values["of_linear"].map("{:.1%}".format),
        }
    )
    return drawing.Table(shown, values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records = context.records["training_step"]
    ours, first = of_linear(records), records.iloc[0]
    several = ours[(ours["method"] == "acp") & (ours["ranks"] > 1)]
    shares = " and ".join(
        f"{style.span(100 * share)} %{' of linear scaling' * (place == 0)} on {ranks} GPUs"
        for place, (ranks, share) in enumerate(several.groupby("ranks")["of_linear"])
    )
    baselines = records.query("implementation == @OFFICIAL")
    pruned = style.span(100 * ours["pruned_ratio"].dropna())
    grows = f" With ACP, training reaches {shares}." if shares else ""
    beside = _against(baselines, ours)
    caption = f"""{naming.heading(context.item)}{grows} The times are whole training steps of this project on
random tokens, on {" and ".join(records["device"].unique())}. The models have fresh weights, with gates such
that ACP prunes {pruned} % of the blocks. Each GPU runs one process, and all processes take equally many
tokens. Times are medians of {first["repeats"]} repeats of {first["steps"]} steps. {beside}"""
    return tabulate(records), caption


def _in_words(setting: tuple) -> str:
    architecture, size, length, words = setting
    return f"{size} ({architecture}), {style.length_label(length)}, vocabulary size {words:,}"


def _against(baselines: pd.DataFrame, ours: pd.DataFrame) -> str:
    """A sentence that compares one GPU with the official model; empty if that model was not timed."""
    both = baselines.merge(ours[ours["ranks"] == 1], on=[*SETTING, "method"], suffixes=("", "_ours"))
    times = both["throughput_tokens_per_s_ours"] / both["throughput_tokens_per_s"]
    rate = style.span(times, ".2f") if len(both) else ""
    return rate and f"On one GPU, the throughput is {rate} times that of the official model in the same run."
