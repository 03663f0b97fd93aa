"""Figure 4: the distribution of pruned ratios over the heads of one model."""

from __future__ import annotations

import numpy as np
import pandas as pd

from acp_repro.common.grid import GLOBAL, LOCAL, head_kind, largest_pruned_ratio

from .. import drawing, style
from ..tables import UnfitRecords, one_each
from ..verdict import Verdict, Word
from . import naming, statistics

BINS = 20
NEAR_LIMIT = 0.01  # the distance from the achievable maximum of a head "at the limit"
KINDS = {
    "global": style.ROLES["global"],
    "intermediate": style.ROLES["intermediate"],
    "local": style.ROLES["local"],
}
# The limits are percentages of the achievable maximum; see head_kinds().
WORDS = {
    "global": f"global (< {100 * GLOBAL:g} % of max.)",
    "intermediate": "intermediate",
    "local": f"local (≥ {100 * LOCAL:g} % of max.)",
}
TOO_COARSE = Verdict(Word.INCONCLUSIVE, "the grid has too few blocks for local heads")


def savings_bins(records: pd.DataFrame) -> np.ndarray:
    """The bin of each head's pruned ratio: [0, 5 %), [5 %, 10 %), ..., [95 %, 100 %]. A head at the
    achievable maximum is in the bin that ends at or contains the maximum.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    limit, _ = grid_limit(records)
    bins = np.minimum(BINS * records["pruned_blocks"] // records["causal_blocks"], BINS - 1)  # no rounding
    last = max(np.ceil(BINS * limit - 1e-9) - 1, 0)
    at_most_limit = records["pruned_ratio"] <= limit + 1e-9  # a closed gate can exceed the limit
    return bins.mask(at_most_limit, np.minimum(bins, last)).to_numpy(dtype=int)


def grid_limit(records: pd.DataFrame) -> tuple[float, np.ndarray]:
    """The achievable maximum on the grid of one run's ``pruned_ratio`` records, and whether each head is at
    the limit, within :data:`NEAR_LIMIT`."""
    grids = records[["context_length_tokens", "block_q_tokens", "block_k_tokens"]].drop_duplicates()
    if len(grids) != 1:
        raise UnfitRecords(f"pruned_ratio: expected the records of one run, got {len(grids)} grids")
    limit = largest_pruned_ratio(*map(int, grids.iloc[0]))
    return limit, (records["pruned_ratio"] >= limit - NEAR_LIMIT).to_numpy()


def head_kinds(records: pd.DataFrame) -> pd.Series:
    """``local``, ``global`` or ``intermediate`` for each head of one run's ``pruned_ratio`` records."""
    limit, _ = grid_limit(one_each(records, ["run", "layer", "head"], "pruned_ratio"))
    return records["pruned_ratio"].map(lambda ratio: head_kind(ratio, limit) or "intermediate")


def kinds(records: pd.DataFrame) -> dict[str, float]:
    """The fractions of global, intermediate and local heads."""
    found = head_kinds(records)
    return {kind: float((found == kind).mean()) for kind in KINDS}


def describe(records: pd.DataFrame, panels: str) -> str:
    """The part of the captions of Figures 4 and 5 on the run, the kinds of heads and the grid."""
    limit, at_limit = grid_limit(records)
    one = records.iloc[0]
    percent = {kind: f"{100 * share:.0f} %" for kind, share in kinds(records).items()}
    grid = f"{one['block_q_tokens']} by {one['block_k_tokens']}"
    return f"""Of the {len(records)} heads of {naming.run_name(one)}, {percent["local"]} are local,
{percent["global"]} are global and {percent["intermediate"]} are intermediate. {panels} A local head prunes at
least {100 * LOCAL:g} % of the achievable maximum, and a global head under {100 * GLOBAL:g} %. The maximum is
the pruned ratio of a head that keeps only the blocks of each query's own key and of the previous key. The
maximum is {100 * limit:.1f} % at {one["context_length_tokens"]:,} tokens in blocks of {grid}. Only a closed
forget gate reaches the shaded region beyond the maximum. The pruned ratios of {at_limit.sum()} heads are
within one percentage point of the maximum, on {one["measured_tokens"]:,} held-out tokens."""


def draw(records: pd.DataFrame) -> drawing.Figure:
    """A histogram of the heads' pruned ratios, coloured by the kind of head.

    Args:
        records: ``pruned_ratio`` records of one run.
    """
    figure, ax = drawing.panels()
    histogram(ax, records, np.ones(len(records), dtype=bool), 100 / len(records))
    ax.set(xlim=(0, 100), ylim=(0, 100), xlabel="pruned ratio of a head's blocks (%)", ylabel="heads (%)")
    drawing.legend(figure, 2)
    return figure


def histogram(ax: drawing.Axes, records: pd.DataFrame, chosen: np.ndarray, unit: float) -> None:
    """Stacked bars of the ``chosen`` heads of one run, each of height ``unit``. The region above the
    achievable maximum is shaded; the bar of the bin that contains the maximum extends into that region."""
    limit = 100 * grid_limit(records)[0]
    found, bins, below = head_kinds(records), savings_bins(records), np.zeros(BINS)
    for kind, colour in KINDS.items():
        heights = unit * np.bincount(bins[chosen & (found == kind)], minlength=BINS)
        look = {"align": "edge", "color": colour, "edgecolor": "white", "lw": 0.3, "label": WORDS[kind]}
        ax.bar(100 / BINS * np.arange(BINS), heights, 100 / BINS, below, **look)
        below += heights
    ax.axvspan(limit, 100, color="0.88", lw=0, zorder=0, label=f"excluded (> {limit:.0f} %)")


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_ratio"]
    panels = f"The bars show the percentage of heads in {BINS} bins of the pruned ratio."
    return draw(records), f"{naming.heading(context.item)} {describe(records, panels)}"


def heads_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if local and global heads exist and together outnumber the intermediate heads."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    found = head_kinds(pruned_ratio)
    local, rest, everywhere = (int((found == k).sum()) for k in ("local", "intermediate", "global"))
    met = local > 0 and everywhere > 0 and local + everywhere > rest
    short = f"{local} local, {everywhere} global and {rest} intermediate heads"
    most = statistics.prunable_percent(*map(int, pruned_ratio[statistics.GRID].iloc[0])) / 100
    strict = (pruned_ratio["pruned_ratio"] >= LOCAL * most).sum()
    ours = (
        f"{short}\nThese kinds are relative to the achievable maximum, a pruned ratio of "
        f"{100 * grid_limit(pruned_ratio)[0]:.1f} %\nRelative to all blocks left of the diagonal "
        f"({100 * most:.1f} % of the causal blocks), {strict} heads would be local"
    )
    return Verdict.of(met, ours, short)


def every_run_bimodal(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if every run whose grid has enough blocks meets :func:`heads_bimodal`."""
    groups = pruned_ratio.groupby(["suite", "run"], sort=False)
    found = {"/".join(run): heads_bimodal(heads) for run, heads in groups if grid_limit(heads)[0] > 0}
    met = [run for run, one in found.items() if one.word is Word.REPRODUCED]
    short = f"{len(met)} of {len(found)} training runs have mostly local and global heads"
    missed = [f"{run}: {one.short}" for run, one in found.items() if run not in met]
    return Verdict.of(len(met) == len(found), "\n".join([short, *missed]), short, n=len(found))


def most_heads_local(pruned_ratio: pd.DataFrame) -> Verdict:
    """Reproduced if more than half of the heads are local."""
    if grid_limit(pruned_ratio)[0] == 0:
        return TOO_COARSE
    local = head_kinds(pruned_ratio) == "local"
    return Verdict.of(bool(local.mean() > 0.5), f"{local.sum()} of {len(local)} heads are local")
