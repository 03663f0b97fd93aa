"""Figure 4: how the savings are spread over the heads of one model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from acp_repro.records import read_records
from acp_repro.suite import load_suite

from . import statistics, style

BINS = 20
EDGES = np.arange(0, 100, 100 // BINS)
KINDS = {"global": style.SIZES[1], "between": "#8c8c8c", "local": style.SIZES[0]}
# Shares of what the grid allows; see statistics.head_kinds.
WORDS = {"global": "global (< 5 %)", "between": "between", "local": "local (≥ 95 %)"}
LIMIT_LINE = {"color": "0.2", "lw": 0.8, "ls": (0, (3, 2))}


def draw(records: pd.DataFrame) -> Figure:
    """Bars of the share of heads in 20 bins of savings, the kinds of heads, and the grid's limit.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    limit, at_limit = statistics.grid_limit(records)
    figure, ax = plt.subplots(figsize=(style.COLUMN_INCHES, 2.3), layout="constrained")
    for shares, below, colour in stacks(records):
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
        (0, 0.5, 1), ("left", "center", "right"), kinds(records).items(), strict=True
    ):
        ax.text(
            x,
            1.03,
            f"{WORDS[kind]}\n{100 * share:.0f} % of heads",
            ha=align,
            va="bottom",
            transform=ax.transAxes,
            color="0.3" if kind == "between" else KINDS[kind],
        )
    ax.plot([100 * limit] * 2, [0, top], **LIMIT_LINE)
    on_right = limit < 0.7  # where there is room
    ax.annotate(
        f"most that the\ngrid allows: {100 * limit:.0f} %\n({at_limit.sum()} heads there)",
        (100 * limit, top),
        (4 if on_right else -4, 0),
        textcoords="offset points",
        ha="left" if on_right else "right",
        va="top",
        fontsize=7,
        color="0.2",
    )
    return figure


def kinds(records: pd.DataFrame) -> dict[str, float]:
    """Shares of global heads, heads between, and local heads."""
    found = statistics.head_kinds(records)
    return {kind: float((found == kind).mean()) for kind in KINDS}


def stacks(records: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Bars to be stacked, one set a kind of head: (shares, what is below them, colour), of 20 bins."""
    found, below = statistics.head_kinds(records), np.zeros(BINS)
    for kind, colour in KINDS.items():
        some = records[found == kind]
        if some.empty:
            continue
        shares = statistics.savings_shares(some["pruned_blocks"], some["causal_blocks"], BINS)
        shares = shares * len(some) / len(records)
        yield shares, below, colour
        below = below + shares


def describe(records: pd.DataFrame) -> str:
    """What captions of Figures 4 and 5 say of the run, its kinds of heads and its grid."""
    limit, at_limit = statistics.grid_limit(records)
    one = records.iloc[0]
    percent = {kind: f"{100 * share:.0f} %" for kind, share in kinds(records).items()}
    grid = f"{one['block_q_tokens']} by {one['block_k_tokens']}"
    return f"""Of the {len(records)} heads of {one["run"]}, {percent["local"]} are local (95 % or more
of what the grid of blocks allows is pruned), {percent["global"]} global (under 5 % of it) and
{percent["between"]} between. Dashed: at {one["context_length_tokens"]:,} tokens in blocks of {grid} no head
can save more than {100 * limit:.1f} % unless a single forget gate closes, for each row keeps the diagonal
block and the one before; {at_limit.sum()} heads are within a percentage point of it. Savings over
{one["measured_tokens"]:,} held-out tokens. {style.provenance(records)}"""


def make(suite: str) -> tuple[Figure, str]:
    run = load_suite(suite).heads_run
    records = read_records(run.suite, "pruned_ratio", run=run.name)
    return draw(records), "**Figure 4.** Savings of single heads in 20 bins. " + describe(records)


if __name__ == "__main__":
    style.main("figure4", __doc__, make)
