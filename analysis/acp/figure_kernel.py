"""The kernels alone: time and rate against length, for us and every baseline that was timed."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each

# Label and colour; every other implementation of the records is a backend of ours.
BASELINES = {
    "official": ("the authors'", style.SIZES[1]),
    "flex": ("FlexAttention", style.SIZES[2]),
    "fla": ("flash-linear-attention", style.SIZES[3]),
    "fa4": ("FlashAttention-4", "#e377c2"),
    "cudnn": ("cuDNN", "#000000"),
    "eager": ("eager PyTorch", "#8c564b"),
}
# Which heads are local.
DRAWN = {
    "mixed": "two heads in three are local",
    "paper_ratio": "so many heads are local that as much is pruned as in the paper",
    "local": "all heads are local",
    "global": "no head is local",
    "one-global": "all heads but one are local",
}
DASHES = {"acp": "-", "exact": "--", "no gates": ":"}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Milliseconds of forward + backward, and TFLOP/s of the computed blocks, against the length.

    Args:
        records: ``kernel_time`` records of one device and one kind of gates.
    """
    from matplotlib.ticker import LogLocator

    one_each(records, ["implementation", "method", "length_tokens"], "kernel_time")
    records = records[records["method"].isin(DASHES)].sort_values("length_tokens")
    figure, (time, rate) = drawing.panels(2, 3.0)
    ours: list[tuple[str, str]] = []
    for (name, method), rows in records.groupby(["implementation", "method"], sort=False):
        label, color = BASELINES.get(name, ("ours", style.SIZES[0]))
        look = {"color": color, "ls": DASHES[method], "marker": "o", "ms": 3}
        look["lw"] = 1 if name in BASELINES else 2
        if method == "no gates":
            look |= {"marker": "s", "ms": 6, "mfc": "none", "zorder": 1}
        how = method.replace("acp", "ACP")
        lengths, ms = rows["length_tokens"], rows["forward_backward_ms"]
        tflops = 1e3 * rows["nominal_forward_backward_tflop"] * (1 - rows["pruned_ratio"]) / ms
        time.plot(lengths, ms, label=f"{label}, {how}", **look)
        rate.plot(lengths, tflops, **look)
        if name not in BASELINES:
            ours.append((f"{ms.iloc[-1]:.3g} ms ({how})", f"{tflops.iloc[-1]:.0f} ({how})"))
    bound = limit(records)
    if not bound.empty:
        words = rf"limit: {bound.name} $\times$ (1 $-$ pruned ratio)"
        time.plot(bound.index, bound, color=style.PAPER, lw=3, alpha=0.6, zorder=1, label=words)
    times, rates = (" and ".join(each) for each in zip(*ours, strict=True))
    time.set_title("Forward + backward time")
    rate.set_title("Rate on the computed blocks")
    time.set(ylabel="forward + backward (ms)", yscale="log")
    time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    time.yaxis.set_major_formatter("{x:g}")
    rate.set(ylabel="TFLOP/s, computed blocks", ylim=(0, None))
    for ax in (time, rate):
        drawing.powers_of_two(ax, sorted(records["length_tokens"].unique()), style.length_label)
        ax.set_xlabel("context length (tokens)")
    drawing.legend(figure, 3)
    return figure


def limit(records: pd.DataFrame) -> pd.Series:
    """Forward + backward of the fastest without gates times the share of blocks that ours keeps, by length.
    Its name is that of the fastest."""
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
    caption = f"""**Kernel times.** At {at}, our kernel takes {ms["acp"]:.3g} ms with ACP and
{ms["exact"]:.3g} ms without, forward and backward. Calls have {first["heads"]} heads of {first["head_dim"]}
and {first["measured_tokens"]:,} random tokens, with gates "{first["gates"]}": {DRAWN[first["gates"]]}. Times
include the boundary search and are medians of {first["repeats"]}. Pruned: {share}. The limit is {fastest}'s
causal attention, which has no gates, times the share of blocks that are kept. (b) FLOPs of the computed
blocks over time."""
    return draw(records), caption
