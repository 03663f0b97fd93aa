"""Kernel benchmark: time and rate against the context length, for this project and every timed baseline."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import naming

# Label and colour of each baseline; every other implementation in the records is a backend of this project.
# Okabe and Ito's colours have roles elsewhere, so these are others.
BASELINES = {
    "official": ("official", "#8C564B"),
    "flex": ("FlexAttention", "#BCBD22"),
    "fla": ("flash-linear-attention", "#17BECF"),
    "fa4": ("FlashAttention-4", "#E377C2"),
    "cudnn": ("cuDNN", "#000000"),
    "eager": ("eager PyTorch", "#7F7F7F"),
}
# The heads that each kind of synthetic gates makes local.
DRAWN = {
    "mixed": "two heads in three are local",
    "paper_ratio": "the number of local heads gives the paper's pruned ratio",
    "local": "all heads are local",
    "global": "no head is local",
    "one-global": "all heads but one are local",
}
DASHES = {"acp": "-", "exact": "--", "no gates": ":"}
LINE_HEIGHT = 0.075  # the least distance of two labels, as a fraction of the axis


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Milliseconds of forward + backward, and TFLOP/s on the computed blocks, against the context length.

    Args:
        records: ``kernel_time`` records of one device and one kind of gates.
    """
    from matplotlib.ticker import LogLocator

    one_each(records, ["implementation", "method", "length_tokens"], "kernel_time")
    records = records[records["method"].isin(DASHES)].sort_values("length_tokens")
    figure, (time, rate) = drawing.panels(2, 2.6)
    ends = []
    for (name, method), rows in records.groupby(["implementation", "method"], sort=False):
        label, color = BASELINES.get(name, ("this work", style.ROLES["acp"]))
        look = {"color": color, "ls": DASHES[method], "lw": 1 if name in BASELINES else 2}
        lengths, ms = rows["length_tokens"], rows["forward_backward_ms"]
        tflops = 1e3 * rows["nominal_forward_backward_tflop"] * (1 - rows["pruned_ratio"]) / ms
        time.plot(lengths, ms, "o", ms=3, **look)
        rate.plot(lengths, tflops, "o", ms=3, **look)
        ends.append((tflops.iloc[-1], f"{label}, {method.replace('acp', 'ACP')}", color))
    bound = limit(records)
    if not bound.empty:
        time.plot(
            bound.index, bound, color=style.PAPER, lw=3, alpha=0.6, zorder=1, label=f"{bound.name} limit"
        )
        time.legend(loc="lower right")
    time.set(title="Forward + backward time", ylabel="forward + backward (ms)", yscale="log")
    time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    time.yaxis.set_major_formatter("{x:g}")
    rate.set(title="Rate on the computed blocks", ylabel="TFLOP/s, computed blocks", ylim=(0, None))
    for ax in (time, rate):
        drawing.powers_of_two(ax, sorted(records["length_tokens"].unique()), style.length_label)
        ax.set_xlabel("context length (tokens)")
    _label_ends(rate, ends)
    return figure


def _label_ends(ax: drawing.Axes, ends: list[tuple[float, str, str]]) -> None:
    """Writes the name of each line, (last value, name, colour), to the right of the axis without overlaps."""
    place, (low, high) = -LINE_HEIGHT, ax.get_ylim()
    for value, words, color in sorted(ends):
        place = max((value - low) / (high - low), place + LINE_HEIGHT)
        ax.text(1.03, place, words, transform=ax.transAxes, color=color, va="center")


def limit(records: pd.DataFrame) -> pd.Series:
    """The time of the fastest gateless kernel times the fraction of blocks that this project keeps, by
    length; the series has the name of that kernel."""
    gateless = records[records["method"] == "no gates"].sort_values("forward_backward_ms")
    fastest = gateless.drop_duplicates("length_tokens").set_index("length_tokens")
    by_length = records.set_index("length_tokens")
    ours = by_length[~by_length["implementation"].isin(BASELINES)].query("method == 'acp'")
    name = " or ".join(BASELINES[x][0] for x in fastest["implementation"].unique())
    return (fastest["forward_backward_ms"] * (1 - ours["pruned_ratio"])).dropna().rename(name)


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["kernel_time"].sort_values("length_tokens", kind="stable")
    first = records.iloc[0]
    share = ", ".join(
        f"{100 * row.pruned_ratio:.0f} % at {style.length_label(row.length_tokens)}"
        for row in records[~records["implementation"].isin(BASELINES)].query("method == 'acp'").itertuples()
    )
    fastest = limit(records).name or "cuDNN"
    ours = records[~records["implementation"].isin(BASELINES)]
    longest = ours[ours["length_tokens"] == ours["length_tokens"].max()].set_index("method")
    at, ms = style.length_label(longest["length_tokens"].iloc[0]), longest["forward_backward_ms"]
    caption = f"""{naming.heading(context.item)} At {at}, forward and backward of our kernel take
{ms["acp"]:.3g} ms with ACP and {ms["exact"]:.3g} ms without, on {" and ".join(records["device"].unique())}.
Each call has {first["heads"]} heads of dimension {first["head_dim"]}, {first["measured_tokens"]:,} random
tokens, and synthetic gates "{first["gates"]}": {DRAWN[first["gates"]]}. Times include the boundary search and
are medians of {first["repeats"]} repeats. Pruned ratios: {share}. Lines are solid with ACP, dashed for exact
attention, and dotted without gates; panel (b) names the lines of both panels. (a) Time against context
length. The grey limit is the time of {fastest}'s causal attention, which has no gates, times the fraction of
kept blocks. (b) FLOPs of the computed blocks divided by the time."""
    return draw(records), caption
