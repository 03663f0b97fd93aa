"""The pruning boundary in one kernel: a binary search per row of blocks (Section 3, Algorithm 1).

c is non-increasing and a rounded subtraction is monotone, so along a row the blocks that the serial
scan would skip come first. Each row can therefore be searched alone, and the result is that of the
scan to the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .tiles import window_start

_ROWS = 128
_SIZES = ["heads", "seqlen_q", "seqlen_k", "blocks", "block_q", "block_k", "steps", "window"]


@triton.jit(do_not_specialize=_SIZES)
def _search_kernel(
    c,
    threshold,
    seq_start,
    boundary,
    heads,
    seqlen_q,
    seqlen_k,
    blocks,
    block_q,
    block_k,
    steps,
    window,
    ROWS: tl.constexpr,
):
    chunks = tl.cdiv(blocks, ROWS)
    bh = tl.program_id(0) // chunks
    m = (tl.program_id(0) % chunks) * ROWS + tl.arange(0, ROWS)
    valid = m < blocks
    first = tl.where(valid, m * block_q, 0) + (seqlen_k - seqlen_q)
    diagonal = first // block_k
    low = tl.zeros([ROWS], dtype=tl.int32)
    if threshold is not None:
        c += bh.to(tl.int64) * seqlen_k
        delta = tl.load(threshold + bh).to(tl.float64)
        row = tl.load(c + first)
        high = diagonal
        for _ in range(steps):
            middle = (low + high) // 2
            column = tl.load(c + tl.minimum(middle * block_k + (block_k - 1), seqlen_k - 1))
            searching = low < high
            pruned = row - column < delta  # a NaN compares as false: kept
            low = tl.where(searching & pruned, middle + 1, low)
            high = tl.where(searching & (pruned == 0), middle, high)
    if seq_start is not None:
        start = tl.load(seq_start + bh // heads)
        low = tl.maximum(low, tl.minimum(start, seqlen_k).to(tl.int32) // block_k)
    if window is not None:
        low = tl.maximum(low, tl.maximum(window_start(first, window), 0) // block_k)
    tl.store(boundary + bh.to(tl.int64) * blocks + m, tl.minimum(low, diagonal), mask=valid)


def find_boundary(
    c: Tensor, threshold: Tensor | None, seqlen_q, block_q, block_k, seq_start=None, window_size=None
) -> Tensor:
    """:func:`..boundary.find_boundary`, which has these arguments; the host never waits."""
    batch, heads, seqlen_k = c.shape
    blocks = triton.cdiv(seqlen_q, block_q)
    boundary = torch.empty((batch, heads, blocks), dtype=torch.int32, device=c.device)
    if boundary.numel() == 0:
        return boundary
    c = c.contiguous()
    if threshold is not None:
        if threshold.shape != (batch, heads):  # a view of an argument would keep a pass from repeating
            threshold = threshold.expand(batch, heads)
        threshold = threshold.contiguous()
    grid = (batch * heads * triton.cdiv(blocks, _ROWS),)
    launch(
        _search_kernel,
        grid,
        c,
        threshold,
        seq_start,
        boundary,
        heads,
        seqlen_q,
        seqlen_k,
        blocks,
        block_q,
        block_k,
        triton.cdiv(seqlen_k, block_k).bit_length(),
        window_size,
        ROWS=_ROWS,
        num_warps=1,
    )
    return boundary
