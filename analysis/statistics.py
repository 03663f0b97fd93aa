"""Derived numbers: pure functions from records to small tables."""

from __future__ import annotations

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
