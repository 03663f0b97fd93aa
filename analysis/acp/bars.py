"""The grouped bars of Figures 2 and 10."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import naming

POINTS_OF_A_NUMBER = 8.0  # nearer to the line of the limit, a number stands in its bar
INSIDE_POINTS = 6.0  # of the text in bars
FITTING_SHARE = 0.36  # of the largest bar: the text of a shorter bar is above it
DASH_WIDTH = 0.3  # of a bar, where nothing was measured


def look(size: str, index: int, tokens: float) -> dict:
    """A bar's colour, pale inside if the model is undertrained."""
    from matplotlib.colors import to_rgba

    colour, start = naming.colour(size, index), naming.at_start(tokens, size)
    return {"fc": to_rgba(colour, 0.25 if start else 1.0), "ec": colour}


def is_dark(colour: tuple) -> bool:
    """Whether white text is the readable one on a colour."""
    return 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.5


def grouped(ax: drawing.Axes, table: pd.DataFrame) -> None:
    """Bars of ``percent``: a group a context length, a colour a size; a dash where nothing was measured. The
    text of the column ``inside`` is written into the bars."""
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
            height = row["percent"]
            ax.bar(x, height, 0.88, **(bar := look(size, index, row["trained_tokens"])))
            inside = row.get("grid_percent", np.inf) - height < POINTS_OF_A_NUMBER
            ink = {"color": "white"} if inside and bar["fc"][3] == 1 else {}  # on a full bar
            if words := row.get("inside"):
                fits = height > FITTING_SHARE * table["percent"].max()
                white = fits and bar["fc"][3] == 1 and is_dark(bar["fc"])
                place, offset = ((x, 0), (0, 2)) if fits else ((x, max(height, 0)), (0, 9))
                look_of_text = {
                    "rotation": 90,
                    "fontsize": INSIDE_POINTS,
                    "color": "white" if white else "0.15",
                }
                drawing.note(ax, words, place, offset, **look_of_text)
            drawing.note(ax, f"{height:.0f}", (x, max(height, 0)), (0, -2 if inside else 0.1), **ink)
        if "grid_percent" in table:
            most = table.loc[table["context_length_tokens"] == length, "grid_percent"].max()
            ax.hlines(most, start, at, color="0.2", lw=1, label="the achievable maximum")
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
