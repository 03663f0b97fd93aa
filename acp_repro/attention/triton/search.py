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
from .tiles import on_device_of, window_start

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
    HAS_THRESHOLD: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
):
    chunks = tl.cdiv(blocks, ROWS)
    bh = tl.program_id(0) // chunks
    m = (tl.program_id(0) % chunks) * ROWS + tl.arange(0, ROWS)
    valid = m < blocks
    first = tl.where(valid, m * block_q, 0) + (seqlen_k - seqlen_q)
    diagonal = first // block_k
    low = tl.zeros([ROWS], dtype=tl.int32)
    if HAS_THRESHOLD:
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
    if HAS_START:
        start = tl.load(seq_start + bh // heads)
        low = tl.maximum(low, tl.minimum(start, seqlen_k).to(tl.int32) // block_k)
    if HAS_WINDOW:
        low = tl.maximum(low, tl.maximum(window_start(first, window), 0) // block_k)
    tl.store(boundary + bh.to(tl.int64) * blocks + m, tl.minimum(low, diagonal), mask=valid)


def find_boundary(
    c: Tensor,
    threshold: Tensor | None,
    seqlen_q: int,
    block_q: int,
    block_k: int,
    seq_start: Tensor | None = None,
    window_size: int | None = None,
) -> Tensor:
    """First kept key block of every query block; the host never waits for it.

    Key block l of query block m is pruned while ``c[first position of m] - c[last position of l] <
    threshold`` in float64, and never past the block of the row's first position.

    Args:
        c: (B, H, Tk) float64, non-increasing along Tk.
        threshold: (B, H) float32, delta; None prunes nothing.
        seq_start: (B,) int64 or None; key blocks wholly before it are skipped too.
        window_size: keys that a query sees, or None; those wholly before the row's window are skipped too.

    Returns:
        (B, H, ceil(seqlen_q / block_q)) int32.
    """
    batch, heads, seqlen_k = c.shape
    blocks = triton.cdiv(seqlen_q, block_q)
    boundary = torch.empty((batch, heads, blocks), dtype=torch.int32, device=c.device)
    if boundary.numel() == 0:
        return boundary
    c = c.contiguous()
    if threshold is not None:
        if threshold.shape != (batch, heads):
            threshold = threshold.expand(batch, heads)
        threshold = threshold.contiguous()
    grid = (batch * heads * triton.cdiv(blocks, _ROWS),)
    with on_device_of(c):
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
            HAS_THRESHOLD=threshold is not None,
            HAS_START=seq_start is not None,
            HAS_WINDOW=window_size is not None,
            ROWS=_ROWS,
            num_warps=1,
        )
    return boundary
