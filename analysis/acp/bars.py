"""The grouped bars of Figures 2 and 10."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import naming

POINTS_BELOW_LIMIT = 8.0  # a number that is closer to the achievable maximum moves into its bar
TEXT_POINTS = 7.0  # the type size of the text in the bars
FITTING_SHARE = 0.36  # bars below this fraction of the largest bar have their text above the bar
DASH_WIDTH = 0.3  # the width of the dash for a missing measurement, relative to a bar
PALE = 0.3  # the opacity of an undertrained model's colour


def look(size: str, index: int, tokens: float) -> dict:
    """The face and edge colour of a bar; the face is pale if the model is undertrained."""
    from matplotlib.colors import to_rgb

    colour = np.array(to_rgb(naming.colour(size, index)))
    pale = 1 - PALE * (1 - colour)
    return {"fc": pale if naming.at_start(tokens, size) else colour, "ec": colour}


def grouped(ax: drawing.Axes, table: pd.DataFrame) -> None:
    """Bars of ``percent``, one group per context length and one colour per size, with a dash in place of a
    missing measurement. The text of the optional column ``inside`` is written into the bars."""
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
            ax.bar(x, height, 0.88, **look(size, index, row["trained_tokens"]))
            below_limit = row.get("grid_percent", np.inf) - height >= POINTS_BELOW_LIMIT
            drawing.note(ax, f"{height:.0f}", (x, max(height, 0)), (0, 0.1 if below_limit else -2))
            if words := row.get("inside"):
                fits = height > FITTING_SHARE * table["percent"].max()
                place, offset = ((x, 0), (0, 2)) if fits else ((x, max(height, 0)), (0, 10))
                drawing.note(ax, words, place, offset, rotation=90, fontsize=TEXT_POINTS)
        if "grid_percent" in table:
            most = table.loc[table["context_length_tokens"] == length, "grid_percent"].max()
            ax.hlines(most, start, at, color="0.2", lw=1, label="achievable maximum")
        centres.append((start + at) / 2)
        at += 0.3
    ax.set_xlim(-pad, at - 0.3 + pad)
    ax.margins(y=0.08)
    ax.grid(visible=False, axis="x")
    ax.set_xticks(centres, map(style.length_label, lengths))
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("context length $L$ (tokens)")


def of_paper(ax: drawing.Axes, low: float, high: float) -> None:
    """The paper's range at these context lengths as a pale band behind the bars; a single value as a line."""
    ax.axhspan(low, high, lw=3 * (low == high), color="0.9", zorder=0, label="the paper, 4k to 16k")
