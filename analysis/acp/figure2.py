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
    "llama": """Delta comes from the measured norms of q and k. To read them counts in the throughput, and not
in the attention time.""",
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
            "FLOPs and memory accesses saved (%)\ndotted: of what the grid allows",
            "pruned_ratio",
            statistics.pruned_of_grid(records["pruned_ratio"]),
            None,
        ),
        (
            "Attention time saved (%)\nalong bars: ms with / without ACP",
            "attention_time_reduction",
            statistics.time_reduction(records["attention_time"]),
            "ms",
        ),
        (
            "Training throughput gained (%)\nalong bars: tokens/s with / without ACP",
            "throughput_gain",
            statistics.throughput_gain(records["throughput"]),
            "tok/s",
        ),
    )
    figure, axes = plt.subplots(1, 3, figsize=(style.PAGE_INCHES, 2.9), layout="constrained")
    labels = []
    for ax, (title, quantity, table, unit) in zip(axes, panels, strict=True):
        low, high = models.PUBLISHED.range(item, quantity)
        labels.append(_bars(ax, table, unit, high))
        _paper_bar(ax, table["context_length_tokens"].nunique(), low, high)
        ax.set_title(title)
        ax.set_xlabel("context length $L$ (tokens)")
    trained = panels[0][2].groupby("size", sort=False)["trained_tokens"]
    handles = [
        Patch(label=_named(size, tokens), **_look(models.colour(size, index), tokens.max(), size))
        for index, (size, tokens) in enumerate(trained)
    ]
    paper = Patch(fc="white", ec=style.PAPER, hatch="////", label="range in the paper")
    handles.append(paper)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(handles)))
    if len(trained) > 1:
        _part(figure, labels)
    _make_room(figure)
    return figure


def _named(size: str, tokens: pd.Series) -> str:
    """ "760M parameters, 20M to 100M tokens (pale: start of training)"."""
    least, most = tokens.min(), tokens.max()
    seen = " to ".join(dict.fromkeys(map(style.count_label, (least, most))))
    mark = " (pale: start of training)" if models.at_start(least, size) else ""
    return f"{models.in_words([size])}, {seen} tokens{mark}"


def _look(colour: str, tokens: float, size: str) -> dict:
    """A bar's colour, pale inside at the start of training."""
    from matplotlib.colors import to_rgba

    return {"fc": to_rgba(colour, 0.25 if models.at_start(tokens, size) else 1.0), "ec": colour, "lw": 0.8}


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
    """Grouped bars of ``percent``; with ``unit`` each bar shows "with / without ACP" inside. A size that has
    no bar at a length says so in its place. A dotted outline on a bar goes up to ``of_grid_percent``.

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
    outlines = []
    centred = {"textcoords": "offset points", "ha": "center"}
    for at, length in enumerate(lengths):
        rows = table[table["context_length_tokens"] == length]
        places = {size: at + (index - (len(sizes) - 1) / 2) * width for index, size in enumerate(sizes)}
        for size in sorted(set(sizes) - set(rows["size"])):
            empty = {"rotation": 90, "va": "bottom", "fontsize": 6, "color": "0.45"}
            ax.annotate("not measured", (places[size], 0), (0, 2), **empty, **centred)
        for row in sorted(rows.itertuples(), key=lambda r: sizes.index(r.size)):
            colour, x = models.colour(row.size, sizes.index(row.size)), places[row.size]
            ax.bar(x, row.percent, width * 0.92, **_look(colour, row.trained_tokens, row.size))
            of_grid = getattr(row, "of_grid_percent", None)
            words, size = [f"{row.percent:.0f}"], {"fontsize": 7 if len(sizes) < 3 else 6.5}
            dark = colour == style.SIZES[0] and not models.at_start(row.trained_tokens, row.size)
            if of_grid is not None:
                outlines.append((x, row.percent, of_grid, colour))
                words.append(f"{of_grid:.0f}")
                if row.percent > 0.15 * (top - bottom):  # else both stand above
                    inside = {"va": "top", "color": "white" if dark else "0.1"}
                    ax.annotate(words.pop(0), (x, row.percent), (0, -2.5), **inside, **size, **centred)
            above = [
                ax.annotate(
                    " / ".join(words), (x, max(of_grid or row.percent, 0)), (0, 1.5), **size, **centred
                )
            ]
            labels.append(above)
            if unit is not None:
                inside = row.percent > 0.45 * (top - bottom)
                form = "{:,.0f}".format if unit == "ms" else style.count_label
                both = " / ".join(map(form, (row.acp, row.exact)))
                numbers = ax.annotate(
                    both,
                    (x, 0 if inside else max(row.percent, 0)),
                    rotation=90,
                    xytext=(0, 4 if inside else 11),
                    va="bottom",
                    fontsize=6.5,
                    color="white" if inside and dark else "0.1",
                    **centred,
                )
                if not inside:
                    above.append(numbers)
    for x, percent, of_grid, colour in outlines:
        look = {"fc": "none", "ec": colour, "ls": ":", "lw": 0.8}
        ax.bar(x, of_grid - percent, width * 0.92, bottom=percent, **look)
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
    pruned = statistics.pruned_of_grid(records["pruned_ratio"])
    grids = pruned.drop_duplicates("context_length_tokens").sort_values("context_length_tokens")
    most_allowed = ", ".join(
        f"{row.grid_percent:.1f} % at {style.length_label(row.context_length_tokens)}"
        for row in grids.itertuples()
    )
    timed = records["attention_time"], records["throughput"]
    commits = models.commits_in_words(*timed) + models.two_commits(records["pruned_ratio"], *timed)
    gained = models.span(statistics.throughput_gain(records["throughput"]), "+.0f")
    pale = (
        "Pale bars are of models at the start of training: they saw fewer tokens than they have weights, and "
        f"under {style.count_label(models.START_TOKENS)}. "
    )
    caption = f"""**{found.item.label}.** ACP prunes {models.span(pruned)} of the attention of
{models.ARCHITECTURES[architecture]} here, and training throughput gains {gained}.
{pale if models.starting(pruned).any() else ""}Left: share of pruned blocks on held-out text. The diagonal
and the blocks that touch it always stay, so no head can prune more than {most_allowed}. Dotted: pruned blocks
as a share of those that may go. It does not grow by itself with $L$. Middle: attention
time, forward and backward, with the boundary search. The bars name the milliseconds with / without ACP for
{", ".join(f"{t:,}" for t in tokens)} tokens. Right: training throughput. The bars name the tokens a second
with / without ACP. {THRESHOLD[architecture]} Hatched: the range that the paper prints for 125M to 760M
parameters and 4k to 16k tokens. Its hardware is another, so compare percentages only.
{commits} {style.provenance(*records.values())}"""
    return draw(records, found.item.name), caption


# --- what the paper says of them; rows past the start of training decide, see models.settled -------------


def pruned_at_longest(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every size prunes :data:`PRUNED_PERCENT` at its longest context; beyond if some prune more."""
    longest = by_length.in_order(statistics.pruned_percent(pruned_ratio)).groupby("size", sort=False).tail(1)
    return in_range(models.settled(longest)["percent"], *PRUNED_PERCENT, by_length.listed(longest))


def savings_grow(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every size prunes more at every longer context, and no smaller share of what may go."""
    return by_length.grows(statistics.pruned_of_grid(pruned_ratio))


def time_saved(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run saves what the paper's range says; beyond if some save more."""
    table = by_length.in_order(statistics.time_reduction(attention_time))
    low, high = models.PUBLISHED.range("figure2", "attention_time_reduction")
    return in_range(models.settled(table)["percent"], low, high, by_length.listed(table))


def throughput_gained(throughput: pd.DataFrame) -> Verdict:
    """Met if every run gains what the paper's range says; beyond if some gain more."""
    table = by_length.in_order(statistics.throughput_gain(throughput))
    low, high = models.PUBLISHED.range("figure2", "throughput_gain")
    return in_range(models.settled(table)["percent"], low, high, by_length.listed(table, sign="+"))


def gains_grow(throughput: pd.DataFrame) -> Verdict:
    """Met if every size gains more throughput at every longer context."""
    return by_length.grows(statistics.throughput_gain(throughput), sign="+")


def attention_sped_up(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run's attention is faster by the paper's range of times; beyond if some more."""
    table = statistics.time_reduction(attention_time)
    table = by_length.in_order(table.assign(times=table["exact"] / table["acp"]))
    low, high = models.PUBLISHED.range("figure2", "attention_speedup")
    ours = by_length.listed(table, "times", digits=1, unit=" times")
    return in_range(models.settled(table)["times"], low, high, ours, unit=" times", nothing=1.0)


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
        f"every size prunes more at every longer context, {by_length.NOT_BY_THE_GRID}",
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
