"""Checks of what the ACP paper says besides its figures and tables; see ``criteria``."""

from __future__ import annotations

import pandas as pd

from acp_repro.papers.acp.claims import SHARE_POINTS, SPARSE_PERCENT
from acp_repro.papers.acp.plan.cost import attention_share_of_flops

from ..verdict import Status, Verdict, in_range
from . import models, statistics
from .criteria import TOO_COARSE, in_order, listed


def attention_sped_up(attention_time: pd.DataFrame) -> Verdict:
    """Met if every run's attention is faster by the paper's range of times; beyond if some more."""
    table = statistics.time_reduction(attention_time)
    table = in_order(table.assign(times=table["exact"] / table["acp"]))
    low, high = models.PUBLISHED.range("figure2", "attention_speedup")
    ours = listed(table, "times", digits=1, unit=" times")
    return in_range(table["times"], low, high, ours, unit=" times")


def attention_share() -> Verdict:
    """Met if the formula gives attention the shares that the paper prints, within :data:`SHARE_POINTS`."""
    table = models.PUBLISHED.table.query("quantity == 'attention_share_of_flops'")
    table = table.astype({"context_length_tokens": int})
    percent = [
        100 * attention_share_of_flops(models.paper_size(row.size), row.context_length_tokens)
        for row in table.itertuples()
    ]
    met = ((table["low"] - percent).abs() <= SHARE_POINTS).all()
    return Verdict.of(bool(met), listed(table.assign(percent=percent), digits=1))


def layers_match_model(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if more than half of the layers past the second have a majority of local heads and a global one."""
    if pruned_ratio["layer"].nunique() < 3:
        return Verdict(Status.UNDECIDED, "the model has no layer past the second")
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    kinds = statistics.head_kinds(pruned_ratio)
    layers = [heads for _, heads in kinds.groupby(pruned_ratio["layer"])][2:]
    alike = sum((heads == "local").mean() > 0.5 and (heads == "global").any() for heads in layers)
    return Verdict.of(alike > len(layers) / 2, f"{alike} of {len(layers)} layers")


def local_and_global_heads(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if every local head prunes more than half of its blocks, and some head none."""
    if statistics.grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = pruned_ratio["pruned_ratio"][statistics.head_kinds(pruned_ratio) == "local"]
    none = int((pruned_ratio["pruned_blocks"] == 0).sum())
    if local.empty:
        return Verdict(Status.UNDECIDED, "no head is local")
    least = f"local heads prune {100 * local.min():.1f} % of their blocks or more"
    heads = "1 head prunes" if none == 1 else f"{none} heads prune"
    return Verdict.of(bool(local.min() > 0.5) and none > 0, f"{least}; {heads} none")


def weights_sparse(decay: pd.DataFrame, attention_weights: pd.DataFrame) -> Verdict:
    """Met if under :data:`SPARSE_PERCENT` of the causal entries of A are recorded, those over 0.1."""
    lengths = decay.groupby(["run", "layer", "head"])["position"].nunique()
    percent = 100 * len(attention_weights) / (lengths * (lengths + 1) / 2).sum()
    return Verdict.of(bool(percent < SPARSE_PERCENT), f"{percent:.2g} % of the entries")
