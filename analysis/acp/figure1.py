"""Figure 1: the blocks that attention visits without and with ACP, for the decay of a trained head."""

from __future__ import annotations

import numpy as np

from .. import drawing, style
from ..tables import UnfitRecords, one_each
from . import naming, statistics

MOST_BLOCKS = 16  # per side, so that the arrows stay legible


def draw(grid: statistics.BlockGrid, delta: float) -> drawing.Figure:
    """Two panels, attention without and with ACP, of the first blocks of one head."""
    figure, axes = drawing.panels(2, 2.75, width=style.PAGE_INCHES * 0.8)
    mesh = _panel(axes[0], grid, np.zeros_like(grid.first_kept), delta)
    axes[0].set_title("Without ACP")
    _panel(axes[1], grid, grid.first_kept, delta)
    pruned = f"{grid.first_kept.sum()} of {(grid.last + 1).sum()}"
    axes[1].set_title(f"With ACP: {pruned} blocks pruned")
    axes[1].plot(
        *statistics.staircase(np.repeat(grid.first_kept * grid.block_k, grid.block_q)),
        color=style.BOUNDARY,
        lw=2.2,
        solid_capstyle="butt",
        solid_joinstyle="miter",
        clip_on=False,
    )
    bar = figure.colorbar(
        mesh, ax=axes, shrink=0.8, aspect=25, pad=0.02, extend="min", ticks=[0, delta, 2 * delta]
    )
    bar.ax.set_yticklabels(["0", f"δ = −{-delta:.1f}", f"2δ = −{-2 * delta:.1f}"])
    bar.set_label("largest $D_{ij}$ of the block (nats)")
    bar.outline.set_visible(False)
    return figure


def _panel(ax: drawing.Axes, grid: statistics.BlockGrid, start: np.ndarray, delta: float) -> drawing.QuadMesh:
    """The causal blocks, coloured by their decay, and an arrow over the blocks that each row visits."""
    rows, columns = grid.largest_decay.shape
    # The scale ends at twice delta, so delta is the middle of the colours.
    mesh = ax.pcolormesh(
        np.arange(columns + 1) * grid.block_k,
        np.arange(rows + 1) * grid.block_q,
        grid.largest_decay,
        cmap=style.decay_map(),
        vmin=2 * delta,
        vmax=0,
        edgecolors="white",
        linewidth=0.8,
    )
    for row, (first, last) in enumerate(zip(start, grid.last, strict=True)):
        y = (row + 0.5) * grid.block_q
        tail, tip = (first + 0.12) * grid.block_k, (last + 0.88) * grid.block_k
        ax.annotate(
            "",
            (tip, y),
            (tail, y),
            arrowprops={
                "arrowstyle": "-|>,head_length=0.25,head_width=0.12",
                "color": "0.1",
                "lw": 0.8,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    ax.set(xticks=[], yticks=[], aspect="equal")
    ax.invert_yaxis()
    ax.set_xlabel(f"key blocks of {grid.block_k} tokens")
    ax.set_ylabel(f"query blocks of {grid.block_q} tokens")
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)
    return mesh


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    (run,), records = context.runs, context.records["decay"]
    if records["threshold_nats"].isna().any():
        raise UnfitRecords(f"figure1: run {run.name} is exact; set measure.run_for_heads to a run with ACP")
    one_each(records, ["run", "layer", "head", "position"], "decay")
    head = statistics.illustrative_head(records, MOST_BLOCKS)
    grid = statistics.block_grid(head, MOST_BLOCKS)
    one, shown = head.iloc[0], min(len(head), len(grid.first_kept) * grid.block_q)
    share = 100 * statistics.share_of_limit(grid)
    caption = f"""{naming.heading(context.item)} (a) The blocks that exact attention visits. (b) ACP skips
{grid.first_kept.sum()} of {(grid.last + 1).sum()} blocks, left of the orange boundary. Each cell is a block
of {grid.block_q} queries by {grid.block_k} keys, the blocks of the kernels. Darker cells have a stronger
decay. Arrows show the order in which the kernel visits the blocks of each row. ACP skips a block if the
largest $D_{{ij}}$ of the block is below delta = {one["threshold_nats"]:.2f}. The decay is that of layer
{one["layer"]}, head {one["head"]} (counted from 0) of {naming.run_name(one)}. The panels show the first
{shown:,} of {len(head):,} tokens of a held-out sequence. Among the recorded heads, the pruned ratio of this
head is closest to half of the achievable maximum ({share:.0f} %)."""
    return draw(grid, one["threshold_nats"]), caption
