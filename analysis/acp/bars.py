"""The grouped bars of Figures 2 and 10."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import naming

MARKS = ("", "////", "....")  # of GPU types
POINTS_OF_A_NUMBER = 8.0  # nearer to the line of the limit, a number stands in its bar
DASH_WIDTH = 0.3  # of a bar, where nothing was measured


def look(size: str, index: int, tokens: float, mark: str = "") -> dict:
    """A bar's colour, pale inside at the start of training, with the mark of its GPU."""
    from matplotlib.colors import to_rgba

    colour, start = naming.colour(size, index), naming.at_start(tokens, size)
    return {"fc": to_rgba(colour, 0.25 if start else 1.0), "ec": "white" if mark else colour, "hatch": mark}


def grouped(ax: drawing.Axes, table: pd.DataFrame, marks: dict[str, str]) -> None:
    """Bars of ``percent``: a group a context length, a colour a size; a dash where nothing was measured.

    Args:
        marks: by ``device``, for tables that have one.
    """
    one_each(table, ["size", "context_length_tokens"], "bars")
    lengths, sizes = sorted(table["context_length_tokens"].unique()), list(dict.fromkeys(table["size"]))
    measured = table.set_index(["size", "context_length_tokens"])
    at, centres, pad = 0.0, [], 0.05 + 0.6 / len(measured)
    for length in lengths:
        start = at
        for index, size in enumerate(sizes):
            if (size, length) not in measured.index:
                at += DASH_WIDTH
                drawing.note(ax, "–", (at - DASH_WIDTH / 2, 0), (0, 0.1))
                continue
            row, x, at = measured.loc[size, length], at + 0.5, at + 1
            height, mark = row["percent"], marks.get(row.get("device"), "")
            ax.bar(x, height, 0.88, **(bar := look(size, index, row["trained_tokens"], mark)))
            inside = row.get("grid_percent", np.inf) - height < POINTS_OF_A_NUMBER
            ink = {"color": "white"} if inside and bar["fc"][3] == 1 else {}  # on a full bar
            drawing.note(ax, f"{height:.0f}", (x, max(height, 0)), (0, -2 if inside else 0.1), **ink)
        if "grid_percent" in table:
            most = table.loc[table["context_length_tokens"] == length, "grid_percent"].max()
            ax.hlines(most, start, at, color="0.2", lw=1, label="the most that the grid allows")
        centres.append((start + at) / 2)
        at += 0.3
    ax.set_xlim(-pad, at - 0.3 + pad)
    ax.margins(y=0.08)
    ax.grid(visible=False, axis="x")
    ax.set_xticks(centres, map(style.length_label, lengths))
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("context length $L$ (tokens)")


def of_paper(ax: drawing.Axes, low: float, high: float) -> None:
    """What the paper prints at these context lengths, as a band behind the bars; one value as a line."""
    look = {"color": "0.82", "zorder": 0, "label": "the paper, 4k to 16k"}
    ax.axhspan(low, high, lw=3 * (low == high), **look)
