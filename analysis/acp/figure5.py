"""Figure 5: how the savings are spread over the heads of each layer."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .. import drawing, style
from . import statistics
from .head_kinds import BINS, EDGES, KINDS, LIMIT_LINE, WORDS, describe, stacks


def draw(records: pd.DataFrame) -> Figure:
    """One column per layer: Figure 4 turned, so that bars grow to the right.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    layers = sorted(records["layer"].unique())
    limit, _ = statistics.grid_limit(records)
    wide = style.PAGE_INCHES if len(layers) > 8 else style.COLUMN_INCHES
    figure, ax = plt.subplots(figsize=(wide, 2.5), layout="constrained")
    for column, layer in enumerate(layers):
        for shares, left, colour in stacks(records[records["layer"] == layer]):
            # No white edges: one head of 24 is a sliver that they would hide.
            ax.barh(
                EDGES + 0.3,
                0.94 * shares,
                100 / BINS - 0.6,
                column + 0.94 * left,
                align="edge",
                color=colour,
                lw=0,
            )
        ax.axvline(column, color="0.75", lw=0.6, zorder=0)
    ax.axhline(100 * limit, **LIMIT_LINE)
    ax.set(xlim=(0, len(layers)), ylim=(0, 100), yticks=range(0, 101, 20))
    ax.set_xticks(np.arange(len(layers)) + 0.5, layers)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("layer (each column: 0 to 100 % of its heads)")
    ax.set_ylabel("pruned share of blocks (%)")
    handles = [Patch(color=colour, label=WORDS[kind]) for kind, colour in KINDS.items()]
    handles.append(Line2D([], [], label="limit, the most that the grid allows", **LIMIT_LINE))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        handlelength=1.3,
        columnspacing=1.2,
        handletextpad=0.5,
        ncols=4 if wide == style.PAGE_INCHES else 2,
    )
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["pruned_ratio"]
    caption = """**Figure 5.** Savings of single heads within each layer (counted from 0): each column is
Figure 4, turned, for the heads of one layer. """
    return draw(records), caption + describe(records)


if __name__ == "__main__":
    drawing.main(globals())
