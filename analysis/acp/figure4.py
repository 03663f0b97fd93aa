"""Figure 4: how the savings are spread over the heads of one model."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .. import drawing, style
from . import head_kinds, statistics
from .head_kinds import BINS, EDGES, KINDS, LIMIT_LINE, WORDS


def draw(records: pd.DataFrame) -> Figure:
    """Bars of the share of heads in 20 bins of savings, the kinds of heads, and the grid's limit.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    limit, at_limit = statistics.grid_limit(records)
    figure, ax = plt.subplots(figsize=(style.COLUMN_INCHES, 2.3), layout="constrained")
    for shares, below, colour in head_kinds.stacks(records):
        ax.bar(
            EDGES,
            100 * shares,
            100 / BINS,
            100 * below,
            align="edge",
            color=colour,
            edgecolor="white",
            lw=0.5,
        )
    ax.set(
        xlim=(0, 100),
        xticks=range(0, 101, 20),
        ylabel="heads (%)",
        xlabel="pruned share of a head's blocks (%)",
    )
    top = 1.3 * ax.dataLim.ymax
    ax.set_ylim(0, top)
    for x, align, (kind, share) in zip(
        (0, 0.5, 1), ("left", "center", "right"), head_kinds.kinds(records).items(), strict=True
    ):
        ax.text(
            x,
            1.03,
            f"{WORDS[kind]}\n{100 * share:.0f} % of heads".replace(" (", "\n("),  # three fit side by side
            ha=align,
            va="bottom",
            transform=ax.transAxes,
            color="0.3" if kind == "between" else KINDS[kind],
        )
    ax.plot([100 * limit] * 2, [0, top], **LIMIT_LINE)
    on_right = limit < 0.7  # where there is room
    ax.annotate(
        f"limit, the most that\nthe grid allows: {100 * limit:.0f} %\n({at_limit.sum()} heads there)",
        (100 * limit, top),
        (4 if on_right else -4, 0),
        textcoords="offset points",
        ha="left" if on_right else "right",
        va="top",
        fontsize=7,
        color="0.2",
    )
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["pruned_ratio"]
    return draw(records), "**Figure 4.** Savings of single heads in 20 bins. " + head_kinds.describe(records)


if __name__ == "__main__":
    drawing.main(globals())
