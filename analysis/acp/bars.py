"""The grouped bars of Figures 2 and 10, and where their labels go."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pandas as pd

from .. import style
from ..tables import one_each
from . import models

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation


def look(colour: str, tokens: float, size: str) -> dict:
    """A bar's colour, pale inside at the start of training."""
    from matplotlib.colors import to_rgba

    return {"fc": to_rgba(colour, 0.25 if models.at_start(tokens, size) else 1.0), "ec": colour, "lw": 0.8}


def lift_labels(figure: Figure, labels: list[list[list[Annotation]]]) -> None:
    """Lifts the labels of the higher of two bars, by panel, whose labels touch."""
    figure.draw_without_rendering()  # places the panels, so that labels have an extent
    gap = figure.dpi / 72
    for panel in labels:
        for left, right in itertools.pairwise(panel):
            low, high = sorted((left, right), key=lambda bar: bar[0].xy[1])
            below, above = low[0].get_window_extent(), high[0].get_window_extent()
            if below.padded(gap / 2).overlaps(above):
                lift = (below.y1 - above.y0) / gap + 0.5
                for label in high:
                    x, y = label.xyann
                    label.xyann = (x, y + lift)


def make_room(figure: Figure) -> None:
    """Raises the top of a panel whose words, of a fixed size, end above it."""
    figure.draw_without_rendering()
    for ax in figure.axes:
        (bottom, top), height = ax.get_ylim(), ax.get_window_extent().height
        for words in ax.texts:
            value = words.xy[1]
            reach = words.get_window_extent().y1 - ax.transData.transform(words.xy)[1]
            top = max(top, bottom + (value - bottom) * height / (height - reach))
        ax.set_ylim(top=top)


def grouped(ax: Axes, table: pd.DataFrame, unit: str | None, paper: float) -> list[list[Annotation]]:
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
            ax.bar(x, row.percent, width * 0.92, **look(colour, row.trained_tokens, row.size))
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
        dotted = {"fc": "none", "ec": colour, "ls": ":", "lw": 0.8}
        ax.bar(x, of_grid - percent, width * 0.92, bottom=percent, **dotted)
    ax.set_xticks([*range(len(lengths)), len(lengths)])
    ax.set_xticklabels([*map(style.length_label, lengths), "paper"])
    ax.tick_params(axis="x", length=0)
    return labels


def of_paper(ax: Axes, x: float, low: float, high: float) -> None:
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
