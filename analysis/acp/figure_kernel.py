"""The kernels alone: time and rate against length, for us and every rival that was timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from ..tables import one_each

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Label and colour; every other implementation of the records is a backend of ours.
RIVALS = {
    "official": ("official", style.SIZES[1]),
    "flex": ("FlexAttention", style.SIZES[2]),
    "fla": ("flash-linear-attention", style.SIZES[3]),
    "fa4": ("FlashAttention-4", "#e377c2"),
    "cudnn": ("cuDNN", "#000000"),
    "eager": ("eager PyTorch", "#8c564b"),
}
METHODS = {"acp": "ACP", "exact": "exact", "no gates": "no gates"}
# Which heads are local.
DRAWN = {
    "bimodal": "two heads in three are local",
    "paper": "so many heads are local that as much is pruned as in the paper",
    "local": "all heads are local",
    "global": "no head is local",
    "one-global": "all heads but one are local",
}
DASHES = {"acp": "-", "exact": "--", "no gates": ":"}


def draw(records: pd.DataFrame) -> Figure:
    """Milliseconds of forward + backward, and TFLOP/s, against the length; both axes logarithmic.

    Args:
        records: ``kernel_time`` records of one device and one kind of gates.
    """
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    one_each(records, ["implementation", "method", "length_tokens"], "kernel_time")
    records = records[records["method"].isin(DASHES)].sort_values("length_tokens")
    figure, (time, rate) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 2.9), layout="constrained")
    for (name, method), rows in records.groupby(["implementation", "method"], sort=False):
        label, color = RIVALS.get(name, ("ours", style.SIZES[0]))
        lengths, seconds = rows["length_tokens"], rows["forward_backward_ms"] / 1e3
        nominal = rows["nominal_forward_backward_tflop"] / seconds
        look = {
            "color": color,
            "linestyle": DASHES[method],
            "marker": "o",
            "markersize": 3,
            "linewidth": 1.0 if name in RIVALS else 1.8,
        }
        time.plot(lengths, 1e3 * seconds, label=f"{label}, {METHODS[method]}", **look)
        rate.plot(lengths, nominal * (1 - rows["pruned_ratio"]), **look)
        if method == "acp":
            rate.plot(lengths, nominal, **{**look, "alpha": 0.4, "markerfacecolor": "white"})
    bound = limit(records)
    if not bound.empty:
        time.plot(
            bound.index,
            bound,
            color=style.PAPER,
            linestyle=(0, (1, 1)),
            linewidth=3,
            alpha=0.6,
            zorder=1,
            label=rf"limit: {bound.name} $\times$ (1 $-$ pruned share)",
        )
    pale = {"color": style.PAPER, "marker": "o", "markerfacecolor": "white", "markersize": 3, "alpha": 0.6}
    rate.plot([], [], label="right, pale: as if none were pruned", **pale)
    time.set_yscale("log")
    time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    time.yaxis.set_major_formatter("{x:g}")
    time.yaxis.set_minor_locator(NullLocator())
    time.set_title("Forward + backward (ms)")
    rate.set_title("TFLOP/s of the blocks computed")
    rate.set_ylim(0)
    lengths = sorted(records["length_tokens"].unique())
    for ax in (time, rate):
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [style.length_label(n) for n in lengths])
        ax.set_xlabel("context length (tokens)")
        ax.xaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside right center")
    return figure


def limit(records: pd.DataFrame) -> pd.Series:
    """Forward + backward of the fastest without gates times the share of blocks that ours keeps, by length.
    Its name is that of the fastest."""
    gateless = records[records["method"] == "no gates"].sort_values("forward_backward_ms")
    fastest = gateless.drop_duplicates("length_tokens").set_index("length_tokens")
    by_length = records.set_index("length_tokens")
    ours = by_length[~by_length["implementation"].isin(RIVALS)].query("method == 'acp'")
    name = " or ".join(RIVALS[x][0] for x in fastest["implementation"].unique())
    return (fastest["forward_backward_ms"] * (1 - ours["pruned_ratio"])).dropna().rename(name)


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["kernel_time"].sort_values("length_tokens", kind="stable")
    first = records.iloc[0]
    share = ", ".join(
        f"{100 * row.pruned_ratio:.0f} % at {style.length_label(row.length_tokens)}"
        for row in records[~records["implementation"].isin(RIVALS)].query("method == 'acp'").itertuples()
    )
    fastest = limit(records).name or "cuDNN"
    ours = records[~records["implementation"].isin(RIVALS)]
    longest = ours[ours["length_tokens"] == ours["length_tokens"].max()].set_index("method")
    acp, exact = (longest["forward_backward_ms"].get(method) for method in ("acp", "exact"))
    at = style.length_label(longest["length_tokens"].iloc[0])
    caption = f"""**Kernel times.** At {at}, our kernel takes {acp:.3g} ms with ACP and {exact:.3g} ms
without, forward and backward. Calls have {first["heads"]} heads of {first["head_dim"]} and
{first["measured_tokens"]:,} random tokens, with gates "{first["gates"]}":
{DRAWN[first["gates"]]}. Times include the boundary search and are medians of {first["repeats"]}.
Pruned: {share}.
The limit is {fastest}'s causal attention, which has no gates, times the share of blocks that are kept.
Right: FLOPs of the computed blocks over time. Pale: FLOPs of the whole triangle ("nominal"), most of which
pruning skips. {style.provenance(records)}"""
    return draw(records), caption
