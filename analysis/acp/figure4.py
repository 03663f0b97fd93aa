"""Figure 4: how the savings are spread over the heads of one model."""

from __future__ import annotations

import numpy as np
import pandas as pd

from acp_repro.common.grid import GLOBAL, LOCAL, head_kind, largest_pruned_ratio

from .. import drawing, style
from ..tables import UnfitRecords, one_each
from ..verdict import Verdict, Word
from . import naming, statistics

BINS = 20
EDGES = 100 / BINS * np.arange(BINS)
KINDS = {
    "global": style.ROLES["global"],
    "intermediate": style.ROLES["intermediate"],
    "local": style.ROLES["local"],
}
# Shares of the limit, the most that the grid of blocks allows; see head_kinds().
WORDS = {
    "global": f"global (< {100 * GLOBAL:g} % of limit)",
    "intermediate": "intermediate",
    "local": f"local (≥ {100 * LOCAL:g} % of limit)",
}
TOO_COARSE = Verdict(Word.INCONCLUSIVE, "the grid has too few blocks for any head to be local")


def savings_bins(records: pd.DataFrame) -> np.ndarray:
    """The bin of each head's savings: [0, 5 %), [5 %, 10 %), ..., [95 %, 100 %]. What the grid allows at most
    ends its bin, so that no bar stands past the limit.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    limit, _ = grid_limit(records)
    bins = np.minimum(BINS * records["pruned_blocks"] // records["causal_blocks"], BINS - 1)  # no rounding
    last = max(np.ceil(BINS * limit - 1e-9) - 1, 0)
    at_most_limit = records["pruned_ratio"] <= limit + 1e-9  # a single closed gate may go past it
    return bins.mask(at_most_limit, np.minimum(bins, last)).to_numpy(dtype=int)


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
    return records["pruned_ratio"].map(lambda ratio: head_kind(ratio, limit) or "intermediate")


def kinds(records: pd.DataFrame) -> dict[str, float]:
    """Shares of global heads, heads between, and local heads."""
    found = head_kinds(records)
    return {kind: float((found == kind).mean()) for kind in KINDS}


def describe(records: pd.DataFrame, panels: str) -> str:
    """What the captions of Figures 4 and 5 say of the run, its kinds of heads and its grid."""
    limit, at_limit = grid_limit(records)
    one = records.iloc[0]
    percent = {kind: f"{100 * share:.0f} %" for kind, share in kinds(records).items()}
    grid = f"{one['block_q_tokens']} by {one['block_k_tokens']}"
    return f"""Of the {len(records)} heads of {naming.run_name(one)}, {percent["local"]} are local,
{percent["global"]} global and {percent["intermediate"]} intermediate. {panels} A local head prunes
{100 * LOCAL:g} % or more of the limit, a global head under {100 * GLOBAL:g} % of it. The limit is the most
that the grid allows, and the shaded region is beyond it: {100 * limit:.1f} % at
{one["context_length_tokens"]:,} tokens in blocks of {grid}. Each row keeps its diagonal block and the one
before, unless a single forget gate closes. {at_limit.sum()} heads are within a percentage point of the limit.
Savings are over {one["measured_tokens"]:,} held-out tokens."""


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Bars of the share of heads in bins of savings, the kinds of heads, and the grid's limit.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    figure, ax = drawing.panels()
    histogram(ax, records, np.ones(len(records), dtype=bool), 100 / len(records))
    ax.set(xlim=(0, 100), ylim=(0, 100), xlabel="pruned ratio of a head's blocks (%)", ylabel="heads (%)")
    drawing.legend(figure, 2)
    return figure


def histogram(ax: drawing.Axes, records: pd.DataFrame, chosen: np.ndarray, unit: float) -> None:
    """Bars of the ``chosen`` heads of one run, each of height ``unit``, over a shade from the limit on.
    Every bar has the width of its bin, so the bin of the limit reaches into the shade."""
    limit = 100 * grid_limit(records)[0]
    found, bins, below = head_kinds(records), savings_bins(records), np.zeros(BINS)
    for kind, colour in KINDS.items():
        heights = unit * np.bincount(bins[chosen & (found == kind)], minlength=BINS)
        look = {"align": "edge", "color": colour, "edgecolor": "white", "lw": 0.3, "label": WORDS[kind]}
        ax.bar(EDGES, heights, 100 / BINS, below, **look)
        below += heights
    ax.axvspan(limit, 100, color="0.88", lw=0, zorder=0, label=f"excluded (> {limit:.0f} %)")


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_ratio"]
    panels = f"The bars are the shares of heads by what they save, in {BINS} bins."
    return draw(records), f"**Figure 4.** {describe(records, panels)}"


def heads_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if there are local and global heads, and more of both together than between."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    found = head_kinds(pruned_ratio)
    local, rest, everywhere = (int((found == k).sum()) for k in ("local", "intermediate", "global"))
    met = local > 0 and everywhere > 0 and local + everywhere > rest
    short = f"{local} local, {everywhere} global, {rest} intermediate"
    most = statistics.prunable_percent(*map(int, pruned_ratio[statistics.GRID].iloc[0])) / 100
    strict = (pruned_ratio["pruned_ratio"] >= LOCAL * most).sum()
    ours = f"{short}; {strict} local of all blocks left of the diagonal's ({100 * most:.1f} %)"
    return Verdict.of(met, ours, short)


def every_run_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if :func:`heads_bimodal` is in every run whose grid has blocks enough."""
    groups = pruned_ratio.groupby(["suite", "run"], sort=False)
    found = {"/".join(run): heads_bimodal(heads) for run, heads in groups if grid_limit(heads)[0] > 0}
    met = [run for run, one in found.items() if one.word is Word.REPRODUCED]
    short = f"in {len(met)} of {len(found)} training runs"
    missed = "; ".join(f"{run}: {one.ours}" for run, one in found.items() if run not in met)
    return Verdict.of(len(met) == len(found), "; ".join(filter(None, (short, missed))), short, n=len(found))


def most_heads_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Met if more than half of the heads are local."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = head_kinds(pruned_ratio) == "local"
    return Verdict.of(bool(local.mean() > 0.5), f"{local.sum()} of {len(local)} heads")
