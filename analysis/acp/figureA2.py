"""Figure A2: what the size of the blocks costs in savings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.common.grid import largest_pruned_ratio
from acp_repro.pipeline.paper import Claim, Item

from .. import drawing, style
from ..tables import one_each
from ..verdict import Status, Verdict
from . import models
from .sweeps import MARGINAL_POINTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(records: pd.DataFrame) -> Figure:
    """Pruned share against the block size, and the most that each grid allows.

    Args:
        records: ``block_size`` records of one run.
    """
    records = one_each(records, ["block_tokens"], "block_size").sort_values("block_tokens")
    length = int(records["context_length_tokens"].iloc[0])
    blocks, percent = records["block_tokens"], 100 * records["pruned_ratio"]
    most = [100 * largest_pruned_ratio(length, b, b) for b in blocks]
    figure, ax = drawing.panels()
    ax.plot(blocks, most, "--", color=style.PAPER, label="the most that the grid allows")
    ax.plot(blocks, percent, "o-", label="measured")
    for x, y in zip(blocks, percent, strict=True):
        drawing.note(ax, f"{y:.0f}", (x, y), (0, -4))
    drawing.powers_of_two(ax, blocks)
    ax.set(ylim=(-12 if percent.min() < 12 else 0, 104), ylabel="attention pruned (%)")
    ax.set_xlabel(f"block size (tokens), $L$ = {style.length_label(length)}")
    ends = [f"{percent.iloc[i]:.0f} % with blocks of {blocks.iloc[i]}" for i in (0, -1)]
    ax.set_title(f"ACP prunes {' and '.join(ends)}")
    drawing.legend(figure)
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["block_size"]
    first = records.iloc[0]
    ends = records.sort_values("block_tokens").iloc[[0, -1]]
    (small, large), (most, least) = ends["block_tokens"], 100 * ends["pruned_ratio"]
    caption = f"""**Figure A2.** From blocks of {small} to blocks of {large} tokens the pruned share goes from
{most:.0f} to {least:.0f} %. A larger block is kept whole for a single entry; blocks of one token prune all
that the threshold allows. Shown is the share of pruned blocks of B x B tokens in {models.run_name(first)}.
The {first["measured_tokens"]:,} held-out tokens, in sequences of {first["context_length_tokens"]:,}, and the
thresholds are the same for all. Dashed: a head that keeps only the blocks with a query's own position or the
one before it."""
    return draw(records), caption


def block_size_negligible(block_size: pd.DataFrame) -> Verdict:
    """Met if blocks of 32 and of 64 differ by less than :data:`MARGINAL_POINTS` percentage points."""
    one_each(block_size, ["block_tokens"], "block_size")
    percent = 100 * block_size.set_index("block_tokens")["pruned_ratio"]
    if not {32, 64} <= set(percent.index):
        return Verdict(Status.UNDECIDED, "blocks of 32 or of 64 are not measured")
    met = abs(percent[32] - percent[64]) < MARGINAL_POINTS
    return Verdict.of(bool(met), ", ".join(f"{share:.1f} % at {size}" for size, share in percent.items()))


ITEMS = (
    Item(
        "figureA2",
        "What the size of blocks costs",
        ("block_size",),
        lambda suite: [suite.sweep_run],
        claims=(
            Claim(
                "The block size hardly matters",
                "Appendix B: blocks are much smaller than the sequence, so the difference is negligible",
                f"savings with blocks of 32 and of 64 differ by less than {MARGINAL_POINTS:g} percentage "
                "points",
                ("block_size",),
                block_size_negligible,
            ),
        ),
        ours=True,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
