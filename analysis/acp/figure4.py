"""Figure 4: how the savings are spread over the heads of one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from acp_repro.chain.paper import Claim, Item
from acp_repro.papers.acp.grid import GLOBAL, LOCAL

from .. import drawing, style
from ..verdict import Status, Verdict
from . import statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 20
EDGES = np.arange(0, 100, 100 // BINS)
KINDS = {"global": style.SIZES[1], "between": "#8c8c8c", "local": style.SIZES[0]}
# Shares of the limit, the most that the grid of blocks allows; see statistics.head_kinds.
WORDS = {
    "global": f"global (< {100 * GLOBAL:g} % of limit)",
    "between": "between",
    "local": f"local (≥ {100 * LOCAL:g} % of limit)",
}
LIMIT_LINE = {"color": "0.2", "lw": 0.8, "ls": (0, (3, 2))}
TOO_COARSE = Verdict(Status.UNDECIDED, "the grid has too few blocks for any head to be local")


def kinds(records: pd.DataFrame) -> dict[str, float]:
    """Shares of global heads, heads between, and local heads."""
    found = statistics.head_kinds(records)
    return {kind: float((found == kind).mean()) for kind in KINDS}


def stacks(records: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Bars to be stacked, one set per kind of head: (shares of 20 bins, what is below them, colour)."""
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
    """What the captions of Figures 4 and 5 say of the run, its kinds of heads and its grid."""
    limit, at_limit = statistics.grid_limit(records)
    one = records.iloc[0]
    percent = {kind: f"{100 * share:.0f} %" for kind, share in kinds(records).items()}
    grid = f"{one['block_q_tokens']} by {one['block_k_tokens']}"
    return f"""Of the {len(records)} heads of {one["run"]}, {percent["local"]} are local (they prune
{100 * LOCAL:g} % or more of the limit, the most that the grid of blocks allows), {percent["global"]} global
(under {100 * GLOBAL:g} % of it) and {percent["between"]} between. Dashed, the limit: at
{one["context_length_tokens"]:,} tokens in blocks of {grid} no head
can save more than {100 * limit:.1f} % unless a single forget gate closes, for each row keeps the diagonal
block and the one before; {at_limit.sum()} heads are within a percentage point of it. Savings over
{one["measured_tokens"]:,} held-out tokens. {style.provenance(records)}"""


def draw(records: pd.DataFrame) -> Figure:
    """Bars of the share of heads in 20 bins of savings, the kinds of heads, and the grid's limit.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    from matplotlib import pyplot as plt

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
    return draw(records), "**Figure 4.** Savings of single heads in 20 bins. " + describe(records)


def heads_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if there are local and global heads, and more of both together than between."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    kinds = statistics.head_kinds(pruned_ratio)
    local, rest, everywhere = (int((kinds == k).sum()) for k in ("local", "between", "global"))
    met = local > 0 and everywhere > 0 and local + everywhere > rest
    return Verdict.of(met, f"{local} local, {everywhere} global, {rest} between")


def most_heads_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if more than half of the heads are local."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = statistics.head_kinds(pruned_ratio) == "local"
    return Verdict.of(bool(local.mean() > 0.5), f"{local.sum()} of {len(local)} heads")


KINDS_IN_WORDS = (
    f"local: {100 * LOCAL:g} % or more of what the grid of blocks allows is pruned; global: under "
    f"{100 * GLOBAL:g} % of it"
)
ITEMS = (
    Item(
        "figure4",
        "Savings of single heads",
        ("pruned_ratio",),
        lambda suite: [suite.heads_run],
        claims=(
            Claim(
                "Heads are either local or global",
                "Section 4.3: a clear bimodal pattern, most heads are local or global",
                "there are local and global heads, together more than there are between "
                f"({KINDS_IN_WORDS})",
                ("pruned_ratio",),
                heads_bimodal,
            ),
            Claim(
                "Most heads are local",
                "Section 4.3: a majority of the heads are local heads",
                f"more than half of the heads are local ({KINDS_IN_WORDS})",
                ("pruned_ratio",),
                most_heads_local,
            ),
        ),
        paper_model=("760M", 4096),
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
