"""Figure 4: how the savings are spread over the heads of one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from acp_repro.common.grid import GLOBAL, LOCAL, head_kind, largest_pruned_ratio

from .. import drawing, style
from ..tables import UnfitRecords, one_each
from ..verdict import Verdict, Word
from . import models

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 20
EDGES = 100 / BINS * np.arange(BINS)
KINDS = {"global": style.SIZES[1], "between": "#8c8c8c", "local": style.SIZES[0]}
# Shares of the limit, the most that the grid of blocks allows; see head_kinds().
WORDS = {
    "global": f"global (< {100 * GLOBAL:g} % of limit)",
    "between": "between",
    "local": f"local (≥ {100 * LOCAL:g} % of limit)",
}
LIMIT_LINE = {"color": "0.2", "lw": 0.8, "ls": (0, (3, 2))}
TOO_COARSE = Verdict(Word.UNTOLD, "the grid has too few blocks for any head to be local")


def savings_shares(pruned: np.ndarray, causal: np.ndarray) -> np.ndarray:
    """Shares of heads by their savings; of 20 bins: [0, 5 %), [5 %, 10 %), ..., [95 %, 100 %]."""
    pruned, causal = (np.asarray(x, dtype=np.int64) for x in (pruned, causal))
    if not len(pruned):
        raise ValueError("savings_shares: there is no head")
    index = np.minimum(BINS * pruned // causal, BINS - 1)
    return np.bincount(index, minlength=BINS) / len(pruned)


def grid_limit(records: pd.DataFrame, within: float = 0.01) -> tuple[float, np.ndarray]:
    """The largest prunable share on the grid of one run's ``pruned_ratio`` records, and the heads there."""
    grids = records[["context_length_tokens", "block_q_tokens", "block_k_tokens"]].drop_duplicates()
    if len(grids) != 1:
        raise UnfitRecords(f"pruned_ratio: needs the records of one run, got {len(grids)} grids")
    limit = largest_pruned_ratio(*map(int, grids.iloc[0]))
    return limit, (records["pruned_ratio"] >= limit - within).to_numpy()


def head_kinds(records: pd.DataFrame) -> pd.Series:
    """``local``, ``global`` or ``between`` for each head of one run's ``pruned_ratio`` records."""
    limit, _ = grid_limit(one_each(records, ["run", "layer", "head"], "pruned_ratio"))
    return records["pruned_ratio"].map(lambda ratio: head_kind(ratio, limit) or "between")


def kinds(records: pd.DataFrame) -> dict[str, float]:
    """Shares of global heads, heads between, and local heads."""
    found = head_kinds(records)
    return {kind: float((found == kind).mean()) for kind in KINDS}


def stacks(records: pd.DataFrame) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    """Bars to be stacked, one set per kind of head: (shares of the bins, what is below them, colour)."""
    found, below = head_kinds(records), np.zeros(BINS)
    for kind, colour in KINDS.items():
        some = records[found == kind]
        if some.empty:
            continue
        shares = savings_shares(some["pruned_blocks"], some["causal_blocks"])
        shares = shares * len(some) / len(records)
        yield shares, below, colour
        below = below + shares


def describe(records: pd.DataFrame, panels: str) -> str:
    """What the captions of Figures 4 and 5 say of the run, its kinds of heads and its grid."""
    limit, at_limit = grid_limit(records)
    one = records.iloc[0]
    percent = {kind: f"{100 * share:.0f} %" for kind, share in kinds(records).items()}
    grid = f"{one['block_q_tokens']} by {one['block_k_tokens']}"
    return f"""Of the {len(records)} heads of {models.run_name(one)}, {percent["local"]} are local,
{percent["global"]} global and {percent["between"]} between. {panels} A local head prunes {100 * LOCAL:g} % or
more of the limit, a global head under {100 * GLOBAL:g} % of it. The limit (dashed) is the most that the grid
allows: {100 * limit:.1f} % at {one["context_length_tokens"]:,} tokens in blocks of {grid}. Each row keeps its
diagonal block and the one before, unless a single forget gate closes. Bars are as wide as their
bin, also where it reaches past the limit. {at_limit.sum()} heads are within a percentage point
of the limit. Savings are over {one["measured_tokens"]:,} held-out tokens.
{style.provenance(records)}"""


def draw(records: pd.DataFrame) -> Figure:
    """Bars of the share of heads in bins of savings, the kinds of heads, and the grid's limit.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    from matplotlib import pyplot as plt

    limit, at_limit = grid_limit(records)
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
    panels = f"The bars are the shares of heads by what they save, in {BINS} bins."
    return draw(records), f"**Figure 4.** {describe(records, panels)}"


def heads_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if there are local and global heads, and more of both together than between."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    found = head_kinds(pruned_ratio)
    local, rest, everywhere = (int((found == k).sum()) for k in ("local", "between", "global"))
    met = local > 0 and everywhere > 0 and local + everywhere > rest
    return Verdict.of(met, f"{local} local, {everywhere} global, {rest} between heads of one training")


def most_heads_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if more than half of the heads are local."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = head_kinds(pruned_ratio) == "local"
    return Verdict.of(bool(local.mean() > 0.5), f"{local.sum()} of {len(local)} heads")
