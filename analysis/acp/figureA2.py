"""Figure A2: what the size of the blocks costs in savings."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from acp_repro.papers.acp.grid import largest_pruned_ratio

from .. import drawing, style
from ..tables import one_each


def draw(records: pd.DataFrame) -> Figure:
    """Pruned share against the block size, and the most that each grid allows.

    Args:
        records: ``block_size`` records of one run.
    """
    records = one_each(records, ["block_tokens"], "block_size").sort_values("block_tokens")
    length = int(records["context_length_tokens"].iloc[0])
    blocks, percent = records["block_tokens"], 100 * records["pruned_ratio"]
    most = [100 * largest_pruned_ratio(length, b, b) for b in blocks]
    figure, ax = plt.subplots(figsize=(style.COLUMN_INCHES, 2.3), layout="constrained")
    ax.plot(blocks, most, "--", color=style.PAPER, label="the most that the grid allows")
    ax.plot(blocks, percent, "o-", color=style.SIZES[0], markersize=4, label="measured")
    for x, y in zip(blocks, percent, strict=True):
        ax.annotate(
            f"{y:.0f}", (x, y), (0, -5), textcoords="offset points", ha="center", va="top", fontsize=7
        )
    ax.set_xscale("log", base=2)
    ax.set_xticks(blocks, [str(b) for b in blocks])
    ax.minorticks_off()
    ax.set_ylim(-12 if percent.min() < 12 else 0, 104)
    ax.set_yticks(range(0, 101, 20))
    ax.set_xlabel(f"block size (tokens), $L$ = {style.length_label(length)}")
    ax.set_title("Attention pruned (%)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 0.08))
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["block_size"]
    first = records.iloc[0]
    caption = f"""**Figure A2.** What the block size costs: share of pruned blocks of B x B tokens in
{first["run"]}, on the same {first["measured_tokens"]:,} held-out tokens in sequences of
{first["context_length_tokens"]:,}, with the same thresholds. Blocks of one token prune all that the
threshold allows; a larger block is kept whole for a single entry. Dashed: a head that keeps only the blocks
that hold a query's own position or the one before it. {style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
