"""The grouped bars of Figures 2 and 10."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import models

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = ("", "////", "....")  # of GPU types


def look(size: str, index: int, tokens: float, mark: str = "") -> dict:
    """A bar's colour, pale inside at the start of training, with the mark of its GPU."""
    from matplotlib.colors import to_rgba

    colour, start = models.colour(size, index), models.at_start(tokens, size)
    return {"fc": to_rgba(colour, 0.25 if start else 1.0), "ec": "white" if mark else colour, "hatch": mark}


def grouped(ax: Axes, table: pd.DataFrame, marks: dict[str, str]) -> None:
    """Bars of ``percent``: a group a context length, a colour a size; a dash where nothing was measured.

    Args:
        marks: by ``device``, for tables that have one.
    """
    from matplotlib.patheffects import withStroke

    one_each(table, ["size", "context_length_tokens"], "bars")
    lengths = sorted(table["context_length_tokens"].unique())
    sizes = list(dict.fromkeys(table["size"]))
    width = 0.94 / max(len(sizes), 2)
    measured = table.set_index(["size", "context_length_tokens"])
    for at, length in enumerate(lengths):
        for index, size in enumerate(sizes):
            x, words, height = at + (index - (len(sizes) - 1) / 2) * width, "–", 0.0
            if (size, length) in measured.index:
                row = measured.loc[size, length]
                height, words = row["percent"], f"{row['percent']:.0f}"
                mark = marks.get(row.get("device"), "")
                ax.bar(x, height, 0.9 * width, **look(size, index, row["trained_tokens"], mark))
            halo = {"path_effects": [withStroke(linewidth=1.5, foreground="white")]}
            drawing.note(ax, words, (x, max(height, 0)), (0, 1), zorder=5, **halo)
        if "grid_percent" in table:
            most = table.loc[table["context_length_tokens"] == length, "grid_percent"].max()
            ax.hlines(most, at - 0.48, at + 0.48, color="0.2", lw=1, label="the most that the grid allows")
    ax.set_xlim(-0.55, len(lengths) - 0.45)
    ax.margins(y=0.1)
    ax.grid(visible=False, axis="x")
    ax.set_xticks(range(len(lengths)), map(style.length_label, lengths))
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("context length $L$ (tokens)")


def of_paper(ax: Axes, low: float, high: float) -> None:
    """What the paper prints at these context lengths, as a band behind the bars; one value as a line."""
    look = {"color": "0.82", "zorder": 0, "label": "the paper, 4k to 16k"}
    if low == high:
        ax.axhline(low, lw=3, **look)
    else:
        ax.axhspan(low, high, lw=0, **look)
