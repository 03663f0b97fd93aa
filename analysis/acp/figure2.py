"""Figures 2 and 10: savings in FLOPs and memory accesses, attention time, and training throughput."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.chain.paper import Claim, Item

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, in_range
from . import by_length, models, statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation


PRUNED_PERCENT = (60.0, 80.0)  # what "around 70 %" is taken to mean
# Where delta comes from.
THRESHOLD = {
    "pro": "Delta comes from the weights of QK-norm (Appendix E) at no cost.",
    "llama": """Delta comes from the measured norms of q and k. Reading them is no part of the attention time,
which is given delta, but of the throughput.""",
}


def draw(records: Mapping[str, pd.DataFrame], item: str = "figure2") -> Figure:
    """Three panels of bars, a group for each context length and a colour for each size.

    Args:
        records: ``pruned_ratio``, ``attention_time`` and ``throughput`` records, of one run each bar.
        item: whose numbers in ``paper_values.csv`` stand beside ours.
    """
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    panels = (
        (
            "FLOPs and memory accesses saved (%)",
            "pruned_ratio",
            statistics.pruned_percent(records["pruned_ratio"]),
            None,
        ),
        (
            "Attention time saved (%)",
            "attention_time_reduction",
            statistics.time_reduction(records["attention_time"]),
            "ms",
        ),
        (
            "Training throughput gained (%)",
            "throughput_gain",
            statistics.throughput_gain(records["throughput"]),
            "tok/s",
        ),
    )
    figure, axes = plt.subplots(1, 3, figsize=(style.PAGE_INCHES, 2.5), layout="constrained")
    labels = []
    for ax, (title, quantity, table, unit) in zip(axes, panels, strict=True):
        low, high = models.PUBLISHED.range(item, quantity)
        labels.append(_bars(ax, table, unit, high))
        _paper_bar(ax, table["context_length_tokens"].nunique(), low, high)
        ax.set_title(title)
        ax.set_xlabel("context length $L$ (tokens)")
    sizes = list(dict.fromkeys(panels[0][2]["size"]))
    handles = [Patch(color=c, label=models.in_words([s])) for s, c in zip(sizes, style.SIZES, strict=False)]
    paper = Patch(fc="white", ec=style.PAPER, hatch="////", label="range in the paper")
    handles.append(paper)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    if len(sizes) > 1:
        _part(figure, labels)
    _make_room(figure)
    return figure


def _part(figure: Figure, labels: list[list[list[Annotation]]]) -> None:
    """Lifts the labels of a bar, by panel, that touch those of the bar to its left."""
    figure.draw_without_rendering()  # places the panels, so that labels have an extent
    gap = figure.dpi / 72
    for panel in labels:
        for left, right in itertools.pairwise(panel):
            before, after = left[0].get_window_extent(), right[0].get_window_extent()
            if before.padded(gap / 2).overlaps(after):
                lift = (before.y1 - after.y0) / gap + 0.5
                for label in right:
                    x, y = label.xyann
                    label.xyann = (x, y + lift)


def _make_room(figure: Figure) -> None:
    """Raises the top of a panel whose words, of a fixed size, end above it."""
    figure.draw_without_rendering()
    for ax in figure.axes:
        (bottom, top), height = ax.get_ylim(), ax.get_window_extent().height
        for words in ax.texts:
            value = words.xy[1]
            reach = words.get_window_extent().y1 - ax.transData.transform(words.xy)[1]
            top = max(top, bottom + (value - bottom) * height / (height - reach))
        ax.set_ylim(top=top)


def _bars(ax: Axes, table: pd.DataFrame, unit: str | None, paper: float) -> list[list[Annotation]]:
    """Grouped bars of ``percent``; with ``unit`` each bar shows "with / without ACP" inside.

    Args:
        paper: the end of the paper's range, for which the axis leaves room.

    Returns:
        what is written above each bar, from left to right.
    """
    one_each(table, ["size", "context_length_tokens"], "bars")
    lengths = sorted(table["context_length_tokens"].unique())
    sizes = list(dict.fromkeys(table["size"]))
    width = 0.8 / len(sizes)
    top = max(table["percent"].max(), paper if unit == "tok/s" else 100.0)
    bottom = min(0, table["percent"].min())
    ax.set_ylim(bottom, 1.17 * top)
    labels: list[list[Annotation]] = []
    for at, length in enumerate(lengths):
        rows = table[table["context_length_tokens"] == length]
        for place, row in enumerate(sorted(rows.itertuples(), key=lambda r: sizes.index(r.size))):
            index = sizes.index(row.size)
            x = at + (place - (len(rows) - 1) / 2) * width  # those that are there, side by side
            ax.bar(x, row.percent, width * 0.92, color=style.SIZES[index])
            above = [
                ax.annotate(
                    f"{row.percent:.0f}",
                    (x, max(row.percent, 0)),
                    (0, 1.5),
                    ha="center",
                    textcoords="offset points",
                    fontsize=7 if len(sizes) < 3 else 6,
                )
            ]
            labels.append(above)
            if unit is not None:
                inside = row.percent > 0.55 * (top - bottom)
                form = "{:,.0f}".format if unit == "ms" else style.count_label
                both = " / ".join(map(form, (row.acp, row.exact)))
                ink = ("white" if index == 0 else "0.1") if inside else "0.25"
                numbers = ax.annotate(
                    f"{both} {unit}",
                    (x, 0 if inside else max(row.percent, 0)),
                    rotation=90,
                    xytext=(0, 4 if inside else 11),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=5.5,
                    color=ink,
                )
                if not inside:
                    above.append(numbers)
    ax.set_xticks([*range(len(lengths)), len(lengths)])
    ax.set_xticklabels([*map(style.length_label, lengths), "paper"])
    ax.tick_params(axis="x", length=0)
    return labels


def _paper_bar(ax: Axes, x: float, low: float, high: float) -> None:
    """What the paper prints: a range from ``low`` to ``high``, or one value as a line."""
    label = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
    ax.bar(
        x,
        max(high - low, 0.4),
        0.5,
        bottom=low,
        facecolor="white",
        edgecolor=style.PAPER,
        hatch="////" if high > low else None,
    )
    ax.annotate(
        f"{'about ' if low == high else ''}{label}",
        (x, high),
        (0, 1.5),
        ha="center",
        textcoords="offset points",
        fontsize=7,
        color="0.35",
    )


def make(found: drawing.Found) -> tuple[Figure, str]:
    records, architecture = found.records, found.runs[0].architecture
    tokens = records["attention_time"]["measured_tokens"].unique()
    caption = f"""**{found.item.label}.** What adaptive computation pruning saves in
{models.ARCHITECTURES[architecture]}, by model size and context length. Left: share of pruned blocks on
held-out text. Middle: attention time, forward and backward, boundary search included; in the bars,
milliseconds with / without ACP for {", ".join(f"{t:,}" for t in tokens)} tokens. Right: training
throughput; in the bars, tokens a second with / without ACP. {THRESHOLD[architecture]}
Hatched: the range that the paper prints for 125M to 760M parameters and 4k to 16k tokens on other
hardware, so compare percentages only. {style.provenance(*records.values())}"""
    return draw(records, found.item.name), caption


# --- what the paper says of them ------------------------------------------------------------------------


def pruned_at_longest(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every size prunes :data:`PRUNED_PERCENT` at its longest context; beyond if some prune more."""
    longest = by_length.in_order(statistics.pruned_percent(pruned_ratio)).groupby("size", sort=False).tail(1)
    return in_range(longest["percent"], *PRUNED_PERCENT, by_length.listed(longest))


def savings_grow(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every size prunes more at every longer context."""
    return by_length.grows(statistics.pruned_percent(pruned_ratio))


def time_saved(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run saves what the paper's range says; beyond if some save more."""
    table = by_length.in_order(statistics.time_reduction(attention_time))
    low, high = models.PUBLISHED.range("figure2", "attention_time_reduction")
    return in_range(table["percent"], low, high, by_length.listed(table))


def throughput_gained(throughput: pd.DataFrame) -> Verdict:
    """Met if every run gains what the paper's range says; beyond if some gain more."""
    table = by_length.in_order(statistics.throughput_gain(throughput))
    low, high = models.PUBLISHED.range("figure2", "throughput_gain")
    return in_range(table["percent"], low, high, by_length.listed(table, sign="+"))


def gains_grow(throughput: pd.DataFrame) -> Verdict:
    """Met if every size gains more throughput at every longer context."""
    return by_length.grows(statistics.throughput_gain(throughput), sign="+")


def attention_sped_up(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run's attention is faster by the paper's range of times; beyond if some more."""
    table = statistics.time_reduction(attention_time)
    table = by_length.in_order(table.assign(times=table["exact"] / table["acp"]))
    low, high = models.PUBLISHED.range("figure2", "attention_speedup")
    ours = by_length.listed(table, "times", digits=1, unit=" times")
    return in_range(table["times"], low, high, ours, unit=" times", nothing=1.0)


CLAIMS = (
    Claim(
        "About 70 % of the FLOPs and memory accesses are pruned",
        "=pruned_ratio",
        "every size prunes {:g} to {:g} % of its blocks at its longest context".format(*PRUNED_PERCENT),
        ("pruned_ratio",),
        pruned_at_longest,
    ),
    Claim(
        "Savings grow with context length",
        by_length.LONGER,
        "every size prunes more at every longer context",
        ("pruned_ratio",),
        savings_grow,
    ),
    Claim(
        "Attention takes 50 % to 70 % less time",
        "=attention_time_reduction",
        "every size saves 50 to 70 % at every context length",
        ("attention_time",),
        time_saved,
    ),
    Claim(
        "Training throughput rises by 10 % to 40 %",
        "=throughput_gain",
        "every size gains 10 to 40 % at every context length",
        ("throughput",),
        throughput_gained,
    ),
    Claim(
        "Throughput gains grow with context length",
        "Section 4.2: longer training context lengths lead to greater throughput improvements",
        "every size gains more at every longer context",
        ("throughput",),
        gains_grow,
    ),
)
SPED_UP = Claim(
    "Attention is 2 to 3 times as fast",
    "=figure2.attention_speedup",
    "at every size and context length exact attention takes 2 to 3 times the time of attention with ACP",
    ("attention_time",),
    attention_sped_up,
    item="figure2",
)

QUANTITIES = ("pruned_ratio", "attention_time", "throughput")
ITEMS = (
    Item(
        "figure2",
        "What ACP saves, FoX (Pro)",
        QUANTITIES,
        lambda suite: suite.with_acp("pro"),
        "FoX (Pro) with ACP",
        CLAIMS,
        ("760M", 16384),
    ),
    Item(
        "figure10",
        "What ACP saves, FoX (LLaMA)",
        QUANTITIES,
        lambda suite: suite.with_acp("llama"),
        "FoX (LLaMA) with ACP",
        CLAIMS,
        ("760M", 16384),
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
