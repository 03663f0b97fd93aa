"""Derived numbers: pure functions from records to small tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

RUN = ["architecture", "size", "context_length_tokens", "seed"]


def pruned_percent(records: pd.DataFrame) -> pd.DataFrame:
    """Percentage of pruned blocks of each run, over all its heads (``pruned_ratio`` records)."""
    blocks = records.groupby(RUN, sort=False)[["pruned_blocks", "causal_blocks"]].sum()
    percent = 100 * blocks["pruned_blocks"] / blocks["causal_blocks"]
    return percent.rename("percent").reset_index()


def by_method(records: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row a run with columns ``acp`` and ``exact``.

    Raises:
        ValueError: a run lacks one of the two.
    """
    table = records.pivot_table(index=RUN, columns="method", values=value, sort=False)
    if not {"acp", "exact"} <= set(table.columns) or table.isna().any(axis=None):
        raise ValueError(f"{value}: every run needs a record with method acp and one with exact")
    return table.reset_index()


def time_reduction(records: pd.DataFrame) -> pd.DataFrame:
    """Forward + backward milliseconds by method, and the percentage that ACP takes off."""
    records = records.assign(total_ms=records["forward_ms"] + records["backward_ms"])
    table = by_method(records, "total_ms")
    return table.assign(percent=100 * (1 - table["acp"] / table["exact"]))


def throughput_gain(records: pd.DataFrame) -> pd.DataFrame:
    """Tokens a second by method, and the percentage that ACP adds."""
    table = by_method(records, "throughput_tokens_per_s")
    return table.assign(percent=100 * (table["acp"] / table["exact"] - 1))


def search_share(records: pd.DataFrame) -> pd.DataFrame:
    """Percentage of attention time (forward + backward, with ACP) that the boundary search takes.

    Returns:
        one row a run: :data:`RUN`, ``search_ms``, ``attention_ms``, ``percent`` (Table 4).

    Raises:
        ValueError: there is no record with ACP.
    """
    table = records[records["method"] == "acp"]
    if table.empty:
        raise ValueError("search_share: no record has method acp")
    attention = table["forward_ms"] + table["backward_ms"]
    search = table["boundary_search_ms"]
    return (
        table[RUN]
        .assign(search_ms=search, attention_ms=attention, percent=100 * search / attention)
        .reset_index(drop=True)
    )


def savings_shares(pruned: np.ndarray, causal: np.ndarray, bins: int = 20) -> np.ndarray:
    """Shares of heads by their savings: [0, 5 %), [5 %, 10 %), ..., [95 %, 100 %] (Figure 4).

    Args:
        pruned, causal: (heads,) whole numbers of blocks, so that no edge of a bin is missed by rounding.

    Returns:
        (bins,) that sum to 1.

    Raises:
        ValueError: there is no head.
    """
    pruned, causal = (np.asarray(x, dtype=np.int64) for x in (pruned, causal))
    if not len(pruned):
        raise ValueError("savings_shares: there is no head")
    index = np.minimum(bins * pruned // causal, bins - 1)
    return np.bincount(index, minlength=bins) / len(pruned)


def largest_prunable_share(context_length: int, block_q: int, block_k: int) -> float:
    """The largest share of blocks that a head can save on a grid, short of forgetting at one stroke.

    A row of blocks keeps the diagonal (D_ii = 0) and the block of the token just before its first query:
    that pair is one forget gate apart, so pruning it would take a single log gate under delta.

    Args:
        context_length, block_q, block_k: in tokens.
    """
    first = np.arange(0, context_length, block_q)
    last = np.minimum(first + block_q, context_length) - 1
    return float((np.maximum(first - 1, 0) // block_k).sum() / (last // block_k + 1).sum())


def grid_limit(records: pd.DataFrame, within: float = 0.01) -> tuple[float, np.ndarray]:
    """The largest prunable share on the grid of one run's ``pruned_ratio`` records, and the heads there.

    Returns:
        the share; and (heads,) bool, which heads save it, or less by at most ``within``, or more.

    Raises:
        ValueError: the records are of several grids.
    """
    grids = records[["context_length_tokens", "block_q_tokens", "block_k_tokens"]].drop_duplicates()
    if len(grids) != 1:
        raise ValueError(f"grid_limit: needs the records of one run, got {len(grids)} grids")
    limit = largest_prunable_share(*map(int, grids.iloc[0]))
    return limit, (records["pruned_ratio"] >= limit - within).to_numpy()


def head_kinds(records: pd.DataFrame) -> pd.Series:
    """ "local", "global" or "between" for each head of one run's ``pruned_ratio`` records.

    Local heads save 95 % or more of what the grid of blocks allows, global ones under 5 % of it. At long
    contexts the grid allows nearly all, and these are Section 4.3's outer bins.
    """
    share = records["pruned_ratio"] / grid_limit(records)[0]
    kinds = pd.Series("between", index=records.index)
    return kinds.mask(share >= 0.95, "local").mask(share < 0.05, "global")


CURVE = ["architecture", "size", "context_length_tokens", "position"]


def loss_differences(records: pd.DataFrame) -> pd.DataFrame:
    """``loss_curve`` records as one row a position: ``acp``, ``exact`` and ``difference`` in nats.

    Runs with the paper's log epsilon = -10 count as ACP; seeds that have both are averaged.

    Raises:
        ValueError: a curve lacks one of the two at every seed, or a position of it.
    """
    tolerance = records["log_pruning_tolerance"]
    method = tolerance.map({-10.0: "acp"}).where(tolerance.notna(), "exact")
    records = records.assign(method=method)
    both = records.groupby([*CURVE[:-1], "seed"])["method"].transform("nunique") == 2
    curves = records.groupby(CURVE[:-1]).ngroups
    records = records[both]
    table = records.pivot_table(index=CURVE, columns="method", values="loss_nats", sort=False)
    if records.groupby(CURVE[:-1]).ngroups != curves or table.isna().any(axis=None):
        raise ValueError("loss_curve: every curve needs a run with ACP and its exact twin")
    return table.assign(difference=table["acp"] - table["exact"]).reset_index()


def largest_gaps(differences: pd.DataFrame) -> pd.DataFrame:
    """Largest absolute difference of each pair of curves of :func:`loss_differences`.

    Returns:
        one row a size and context length, in the order given: ``gap_nats`` and the ``position``.
    """
    gaps = differences.assign(gap_nats=differences["difference"].abs())
    rows = gaps.groupby(CURVE[:-1], sort=False)["gap_nats"].idxmax()
    return gaps.loc[rows, [*CURVE, "gap_nats"]].reset_index(drop=True)


def seed_gap(records: pd.DataFrame) -> float | None:
    """Largest difference in nats between the curves of two seeds of one setting; None with one seed."""
    table = records.pivot_table(
        index=[*CURVE, records["log_pruning_tolerance"].fillna(0)], columns="seed", values="loss_nats"
    )
    return None if table.shape[1] < 2 else float((table.max(axis=1) - table.min(axis=1)).max())


class BlockGrid(NamedTuple):
    """The first rows of blocks of one head's attention (Figure 1)."""

    largest_decay: np.ndarray  # (M, N) largest D_ij of each block in nats, NaN above the diagonal
    first_kept: np.ndarray  # (M,) n_m, the first key block that is visited
    last: np.ndarray  # (M,) the last key block of the causal half
    block_q: int
    block_k: int


def block_grid(head: pd.DataFrame, most_blocks: int) -> BlockGrid:
    """The first rows of blocks, ``most_blocks`` a side at most, from the ``decay`` records of one head.

    The largest D_ij of a block is c of its first query less c of its last key, and 0 where the block
    holds a diagonal entry (Section 3).
    """
    block_q, block_k = (int(head[f"block_{side}_tokens"].iloc[0]) for side in "qk")
    c = head["cumulative_log_fgate_nats"].to_numpy()
    most_rows = max(1, most_blocks * min(block_q, block_k) // block_q)
    first = np.arange(0, len(c), block_q)[:most_rows]
    last = (np.minimum(first + block_q, len(c)) - 1) // block_k
    columns = np.arange(last[-1] + 1)
    last_keys = np.minimum((columns + 1) * block_k, len(c)) - 1
    largest = np.minimum(c[first][:, None] - c[last_keys], 0.0)
    largest = np.where(columns <= last[:, None], largest, np.nan)
    first_kept = head["first_kept_key_position"].to_numpy()[first] // block_k
    return BlockGrid(largest, first_kept, last, block_q, block_k)


def illustrative_head(records: pd.DataFrame, most_blocks: int) -> pd.DataFrame:
    """Of the heads in ``decay`` records, the one that shows pruning best in the first rows of blocks.

    It is the head whose pruned share of those blocks is nearest to half of the largest that the grid
    allows, so that neither everything nor nothing is pruned.
    """

    def distance(head: pd.DataFrame) -> float:
        return abs(share_of_limit(block_grid(head, most_blocks)) - 0.5)

    return min((head for _, head in records.groupby(["layer", "head"], sort=False)), key=distance)


def share_of_limit(grid: BlockGrid) -> float:
    """Pruned blocks over the most that the grid allows, of the rows shown; 1 for a local head."""
    shown = grid.last[-1] * grid.block_k + grid.block_k
    most = largest_prunable_share(int(shown), grid.block_q, grid.block_k)
    return float(grid.first_kept.sum() / (grid.last + 1).sum() / most)


def staircase(first_kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The boundary as a line (x, y) in token coordinates, y down, from each query's first kept key.

    Args:
        first_kept: (T,) key positions.

    Returns:
        x, y: (2 * steps,) corners; token t covers t to t + 1.
    """
    starts = np.flatnonzero(np.diff(first_kept, prepend=-1))
    return np.repeat(first_kept[starts], 2), np.repeat([*starts, len(first_kept)], 2)[1:-1]
