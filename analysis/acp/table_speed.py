"""Attention time and training throughput at the pruned ratio of the paper, beside the official code."""

from dataclasses import replace

import pandas as pd

from .. import drawing, style
from ..tables import UnfitRecords, side_by_side
from ..verdict import Verdict, in_range
from . import by_length, naming, versions
from .figure_kernel import BASELINES
from .statistics import METHODS
from .table_scaling import OFFICIAL

SHARE_PERCENT = (65.0, 70.0)  # the pruned ratio of the benchmarks' gates "paper_ratio"
RECOMPUTED = "-recomputed"  # the suffix of a size of suite h200-speed with gradient checkpointing
KEY = ["size", "context_length_tokens"]


def attention(kernel_time: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of attention, forward and backward, and the percentage that ACP saves."""
    shapes = [f"{row.heads} heads of {row.head_dim}" for row in kernel_time.itertuples()]
    records = kernel_time.assign(size=shapes, context_length_tokens=kernel_time["length_tokens"])
    table = _sides(records, "forward_backward_ms", "kernel_time")
    return table.assign(percent=100 * (1 - table["acp"] / table["exact"]))


def training(training_step: pd.DataFrame) -> pd.DataFrame:
    """Training tokens per second on one GPU, and the percentage that ACP gains."""
    records = training_step.assign(size=_named(training_step["size"]))[training_step["ranks"] == 1]
    table = _sides(records, "throughput_tokens_per_s", "training_step")
    return table.assign(percent=100 * (table["acp"] / table["exact"] - 1))


def _named(sizes: pd.Series) -> pd.Series:
    return sizes.str.replace(RECOMPUTED, " with checkpointing", regex=False)


def _sides(records: pd.DataFrame, value: str, what: str) -> pd.DataFrame:
    ours = records[~records["implementation"].isin(BASELINES) & (records["method"] == "acp")]
    pruned = ours[[*KEY, "device"]].assign(pruned_percent=100 * ours["pruned_ratio"])
    if pruned.empty or not pruned["pruned_percent"].between(*SHARE_PERCENT).all():
        raise UnfitRecords(
            f"{what}: timed at another share than {SHARE_PERCENT[0]:g} to {SHARE_PERCENT[1]:g} % pruned"
        )
    records = records[~records["implementation"].isin(set(BASELINES) - {OFFICIAL})]
    table = side_by_side(records, [*KEY, "implementation"], "method", value, METHODS, what)
    return table.merge(pruned, on=KEY)


def tabulate(kernel_time: pd.DataFrame, training_step: pd.DataFrame) -> drawing.Table:
    """One row per shape and length, with the columns of this project and then of the official code."""
    kinds = {"attention (ms)": attention(kernel_time), "training (tokens/s)": training(training_step)}
    values = pd.concat(table.assign(what=what) for what, table in kinds.items())
    rows = []
    for (what, size, length), both in values.groupby(["what", *KEY], sort=False):
        form, sign = ("{:.3g}".format, "−") if "ms" in what else (style.count_label, "+")
        row = {
            "benchmark": f"{what}, {size}",
            "L": style.length_label(length),
            "pruned": f"{both['pruned_percent'].iloc[0]:.0f} %",
        }
        for one in both.sort_values("implementation", key=lambda name: name == OFFICIAL).itertuples():
            whose = "official" if one.implementation == OFFICIAL else "this work"
            row |= {f"{whose}, exact": form(one.exact), f"{whose}, ACP": form(one.acp)}
            row[f"{whose}, change"] = f"{sign}{one.percent:.0f} %"
        rows.append(row)
    return drawing.Table(pd.DataFrame(rows).fillna("–"), values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    times, steps = context.records["kernel_time"], context.records["training_step"]
    saved, gained = (_ours(table) for table in (attention(times), training(steps)))
    pruned = pd.concat([saved, gained])["pruned_percent"]
    gpus = " and ".join(sorted(times["device"].unique()))
    trained_on = versions.timed_on(steps.assign(size=_named(steps["size"])))
    caption = f"""{naming.heading(context.item)} ACP saves {style.span(saved["percent"])} % of the attention
time, and raises training throughput by {style.span(gained["percent"], ".0f")} %. Synthetic gates prune
{style.span(pruned)} % of the blocks at every context length $L$. Weights and tokens are random. Attention is
one forward and backward call on {times["measured_tokens"].iloc[0]:,} tokens on {gpus}, including the boundary
search. Training is whole steps on one GPU, in micro-batches of {steps["step_tokens"].iloc[0]:,} tokens.
Checkpointing is gradient checkpointing, which the paper uses. "Official" is the official kernels, and the
official model in our training loop. {trained_on}"""
    return tabulate(times, steps), caption


def _ours(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["implementation"] != OFFICIAL]


# --- claims ---------------------------------------------------------------------------------------------


def attention_saved(kernel_time: pd.DataFrame) -> Verdict:
    """Reproduced if the official attention saves a percentage in the paper's range at every length."""
    return _judge(
        attention(kernel_time),
        "attention_time_reduction",
        "kernels",
        "attention time saved with",
        " less time",
    )


def training_sped_up(training_step: pd.DataFrame) -> Verdict:
    """Reproduced if the official model gains a percentage in the paper's range in every setting."""
    return _judge(
        training(training_step), "throughput_gain", "model", "throughput gain of", " more throughput", "+"
    )


def _judge(table: pd.DataFrame, metric: str, code: str, what: str, quantity: str, sign: str = "") -> Verdict:
    """The verdict on the official code; the numbers include this project's."""
    ours = _ours(table)
    theirs = table.drop(ours.index)
    both = [by_length.listed(by_length.in_order(some), what, sign=sign) for some in (theirs, ours)]
    drawn = f"synthetic gates prune {style.span(ours['pruned_percent'])} % of the blocks"
    ends = naming.PUBLISHED.range("figure2", metric)
    words = f"Official {code}, {both[0]}\nThis project's {code}, {both[1]}\nThe {drawn}"
    found = in_range(theirs["percent"], *ends, words, n=len(theirs), unit="shape", what=quantity)
    return replace(
        found, short=f"official {code}: {found.short}, this project's: {style.span(ours['percent'])} %"
    )
