"""Figure A2: pruned ratio as a function of the block size."""

from __future__ import annotations

import pandas as pd

from acp_repro.common.grid import largest_pruned_ratio

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, Word
from . import naming
from .sweeps import MARGINAL_POINTS


def draw(records: pd.DataFrame) -> drawing.Figure:
    """The pruned ratio against the block size, with the achievable maximum of each grid.

    Args:
        records: ``block_size`` records of one run.
    """
    records = one_each(records, ["block_tokens"], "block_size").sort_values("block_tokens")
    length = int(records["context_length_tokens"].iloc[0])
    blocks, percent = records["block_tokens"], 100 * records["pruned_ratio"]
    most = [100 * largest_pruned_ratio(length, b, b) for b in blocks]
    figure, ax = drawing.panels()
    ax.plot(blocks, most, "--", color=style.PAPER, label="achievable maximum")
    ax.plot(blocks, percent, "o-", color=style.ROLES["acp"], label="measured")
    for x, y in zip(blocks, percent, strict=True):
        drawing.note(ax, f"{y:.0f}", (x, y), (0, -4))
    drawing.powers_of_two(ax, blocks)
    ax.set(ylim=(-12 if percent.min() < 12 else 0, 104), ylabel="attention pruned (%)")
    ax.set_xlabel(f"block size (tokens), $L$ = {style.length_label(length)}")
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["block_size"]
    first = records.iloc[0]
    ends = records.sort_values("block_tokens").iloc[[0, -1]]
    (small, large), (most, least) = ends["block_tokens"], 100 * ends["pruned_ratio"]
    caption = f"""{naming.heading(context.item)} The pruned ratio falls from {most:.0f} % with blocks of
{small} token{"s" * (small > 1)} to {least:.0f} % with blocks of {large} tokens. One kept entry keeps its
whole block. Blocks of one token prune every entry that the threshold allows. The solid line shows the
percentage of pruned blocks of B by B tokens in {naming.run_name(first)}. All block sizes use the same
{first["measured_tokens"]:,} held-out tokens, in sequences of {first["context_length_tokens"]:,}, and the same
thresholds. The dashed line is the maximum of a head that keeps only the blocks of each query's own and
previous key."""
    return draw(records), caption


def block_size_negligible(block_size: pd.DataFrame) -> Verdict:
    """Reproduced if the pruned ratios of blocks of 16 to 128 tokens agree within :data:`MARGINAL_POINTS`
    percentage points; inconclusive if only blocks of 32 and 64 agree, as the paper names no sizes."""
    one_each(block_size, ["block_tokens"], "block_size")
    percent = 100 * block_size.set_index("block_tokens")["pruned_ratio"]
    if not {32, 64} <= set(percent.index):
        return Verdict(Word.INCONCLUSIVE, "blocks of 32 or of 64 are not measured")
    usual = percent[percent.index.isin((16, 32, 64, 128))]
    apart, two = usual.max() - usual.min(), abs(percent[32] - percent[64])
    met = True if apart < MARGINAL_POINTS else None if two < MARGINAL_POINTS else False
    short = (
        f"the pruned ratio changes by {two:.1f} points from 32 to 64 tokens per block, by {apart:.1f} from "
        f"{usual.index.min()} to {usual.index.max()}"
    )
    each = ", ".join(f"{share:.1f} % at {size}" for size, share in percent.items())
    ours = (
        f"{short}\nPruned ratio by block size in tokens: {each}"
        "\nThe paper states that its blocks are smaller than 128 tokens"
        "\nOur kernels use blocks of 128 queries by 64 keys on a GPU"
    )
    return Verdict.of(met, ours, short)
