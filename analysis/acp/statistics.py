"""Derived statistics: pure functions from records to small tables."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from acp_repro.common import grid

from ..tables import UnfitRecords, one_each, side_by_side, some

RUN = ["architecture", "size", "context_length_tokens", "log_pruning_tolerance", "seed", "trained_tokens"]
TIMED = [*RUN, "device"]
GRID = ["context_length_tokens", "block_q_tokens", "block_k_tokens"]
METHODS = ("acp", "exact")


def methods(records: pd.DataFrame) -> pd.Series:
    """``exact`` or ``acp`` by row, the method with which the run of a record was trained."""
    return records["log_pruning_tolerance"].isna().map({True: "exact", False: "acp"})


def pruned_percent(records: pd.DataFrame) -> pd.DataFrame:
    """The percentage of pruned blocks of each run over all heads (``pruned_ratio`` records)."""
    one_each(records, [*RUN, "layer", "head"], "pruned_ratio")
    blocks = records.groupby(RUN, sort=False, dropna=False)[["pruned_blocks", "causal_blocks"]].sum()
    percent = 100 * blocks["pruned_blocks"] / blocks["causal_blocks"]
    return percent.rename("percent").reset_index()


def pruned_of_grid(records: pd.DataFrame) -> pd.DataFrame:
    """:func:`pruned_percent` with the percentage that the block grid of the run allows a head to prune."""
    grids = records[[*RUN, *GRID[1:]]].drop_duplicates()
    sides = one_each(grids, RUN, "pruned_ratio")[GRID].reset_index(drop=True)
    most = [100 * grid.largest_pruned_ratio(*map(int, each)) for each in sides.to_numpy()]
    return pruned_percent(records).assign(grid_percent=most, **sides[GRID[1:]])


def prunable_percent(length: int, block_q: int, block_k: int) -> float:
    """The percentage of causal blocks left of the diagonal blocks. Closed gates can prune all of these
    blocks, beyond :func:`grid.largest_pruned_ratio`."""
    starts = np.arange(0, length, block_q)
    causal = (np.minimum(starts + block_q, length) - 1) // block_k + 1
    return float(100 * (starts // block_k).sum() / causal.sum())


def time_reduction(records: pd.DataFrame, forwards: int = 1) -> pd.DataFrame:
    """Time of ``forwards`` forward passes and a backward pass in ms by method, and the percentage that ACP
    saves; one row per timed run."""
    records = records.assign(total_ms=forwards * records["forward_ms"] + records["backward_ms"])
    table = side_by_side(records, TIMED, "method", "total_ms", METHODS, "attention_time")
    return table.assign(percent=100 * (1 - table["acp"] / table["exact"]))


def throughput_gain(records: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second by method, and the percentage that ACP gains; one row per timed run."""
    table = side_by_side(records, TIMED, "method", "throughput_tokens_per_s", METHODS, "throughput")
    return table.assign(percent=100 * (table["acp"] / table["exact"] - 1))


def search_share(records: pd.DataFrame) -> pd.DataFrame:
    """The percentage of attention time (forward + backward, with ACP) spent on the boundary search."""
    table = some(records[records["method"] == "acp"], "attention_time, acp")
    one_each(table, TIMED, "attention_time")
    attention, search = table["forward_ms"] + table["backward_ms"], table["boundary_search_ms"]
    table = table[TIMED].assign(search_ms=search, attention_ms=attention, percent=100 * search / attention)
    return table.reset_index(drop=True)


CURVE = ["architecture", "size", "context_length_tokens", "position"]


def loss_differences(records: pd.DataFrame) -> pd.DataFrame:
    """``loss_curve`` records joined by pair of runs, with columns for ACP and exact."""
    tolerance = records["log_pruning_tolerance"]
    method = tolerance.map({-10.0: "acp"}).where(tolerance.notna(), "exact")
    records = records.assign(method=method)[method.notna()]
    both = records.groupby([*CURVE[:-1], "seed"])["method"].transform("nunique") == 2
    curves = records.groupby(CURVE[:-1]).ngroups
    paired = records[both]
    if paired.groupby(CURVE[:-1]).ngroups != curves:
        raise UnfitRecords("loss_curve: every curve needs a run with ACP and its exact pair")
    pairs = side_by_side(paired, [*CURVE, "seed"], "method", "loss_nats", METHODS, "loss_curve")
    return pairs.assign(difference=pairs["acp"] - pairs["exact"])


def largest_gaps(differences: pd.DataFrame) -> pd.DataFrame:
    """The largest absolute difference between the two curves of each pair in :func:`loss_differences`."""
    gaps = differences.assign(gap_nats=differences["difference"].abs())
    rows = gaps.groupby([*CURVE[:-1], "seed"], sort=False)["gap_nats"].idxmax()
    return gaps.loc[rows, [*CURVE, "seed", "gap_nats"]].reset_index(drop=True)


class BlockGrid(NamedTuple):
    """The first rows of blocks of one head's attention (Figure 1)."""

    largest_decay: np.ndarray  # (M, N) largest D_ij of each block in nats, NaN above the diagonal
    first_kept: np.ndarray  # (M,) n_m, the first key block that is visited
    last: np.ndarray  # (M,) the last key block of the causal half
    block_q: int
    block_k: int


def block_grid(head: pd.DataFrame, most_blocks: int) -> BlockGrid:
    """The first blocks, at most ``most_blocks`` per side, from the ``decay`` records of one head."""
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
    """The head in ``decay`` records that shows pruning best in the first rows of blocks."""
    heads = [head for _, head in records.groupby(["layer", "head"], sort=False)]
    return min(heads, key=lambda head: abs(share_of_limit(block_grid(head, most_blocks)) - 0.5))


def share_of_limit(blocks: BlockGrid) -> float:
    """Pruned blocks in the shown rows over the achievable maximum; 0 if nothing can be pruned."""
    shown = (blocks.last[-1] + 1) * blocks.block_k
    most = grid.largest_pruned_ratio(int(shown), blocks.block_q, blocks.block_k)
    return float(blocks.first_kept.sum() / (blocks.last + 1).sum() / most) if most else 0.0


def staircase(first_kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The boundary as a line (x, y) in token coordinates, y down, from each query's first kept key."""
    starts = np.flatnonzero(np.diff(first_kept, prepend=-1))
    return np.repeat(first_kept[starts], 2), np.repeat([*starts, len(first_kept)], 2)[1:-1]
