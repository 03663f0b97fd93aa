"""Savings of single heads, by kind: what Figures 4 and 5 share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from acp_repro.papers.acp.grid import GLOBAL, LOCAL

from .. import style
from . import statistics

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
    """What captions of Figures 4 and 5 say of the run, its kinds of heads and its grid."""
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
