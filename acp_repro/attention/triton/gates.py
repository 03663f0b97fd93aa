"""One kernel that prepares the gates for a pass, and one for the adjoint of their running sum.

The first kernel sums c (Section 2) in float64 and in a fixed order, with one program per head. A binary
search for each row of blocks then finds the boundary (Section 3, Algorithm 1). c is non-increasing and a
rounded subtraction is monotone, so the blocks that the serial scan would skip are the first of their row.
Each row can therefore be searched independently, with exactly the result of the scan. The kernel also writes
the terms of c that :mod:`.differences` defines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decay import LOG_FGATE_FLOOR
from .differences import DecayTerms, pack
from .launch import launch
from .tiles import LOG2E, head_of, strides_of, window_start

_BLOCK = 4096
_ROWS = 256
_FLOOR = tl.constexpr(LOG_FGATE_FLOOR)
_SIZES = ["heads", "chunks", "length", "queries", "row", "blocks", "block_q", "block_k", "steps", "window"]


@triton.jit(do_not_specialize=_SIZES)
def _gates_kernel(
    log_fgate,
    c,
    pairs,
    tail,
    threshold,
    delta,
    seq_start,
    boundary,
    strides,
    heads,
    chunks,
    length,
    row,
    queries,
    blocks,
    block_q,
    block_k,
    steps,
    window,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes c from log_fgate if given; ``chunks``, the number of programs per head, is then 1."""
    bh = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    wide = bh.to(tl.int64)
    c += wide * length
    if seq_start is not None:
        earliest = tl.load(seq_start + bh // heads)
    if log_fgate is not None:
        log_fgate = head_of(log_fgate, bh // heads, bh % heads, strides, False)
    carry = tl.zeros([], dtype=tl.float64)
    for base in range(chunk * BLOCK, length, chunks * BLOCK):
        j = base + tl.arange(0, BLOCK)
        valid = j < length
        if log_fgate is not None:
            x = tl.load(log_fgate + j.to(tl.int64) * strides.token, mask=valid, other=0.0)
            x = tl.maximum(x.to(tl.float64), _FLOOR, propagate_nan=tl.PropagateNan.ALL)
            c_j = carry + tl.cumsum(x, 0)
            tl.store(c + j, c_j, mask=valid)
            carry += tl.sum(x, 0)
        else:
            c_j = tl.load(c + j, mask=valid, other=0.0)
        if pairs is not None:
            scaled = c_j * LOG2E
            rounded = scaled.to(tl.float32)
            rest = (scaled - rounded.to(tl.float64)).to(tl.float32)
            # c is non-increasing, so its last number in a tile is the smallest. (A NaN propagates.)
            apart = tl.reshape(tl.where(valid, c_j, float("inf")), [BLOCK // TILE, TILE])
            below = tl.reshape(tl.min(apart, 1)[:, None] - apart, [BLOCK])
            below = (below * LOG2E).to(tl.float32)
            if seq_start is not None:
                below = tl.where(j < earliest, float("-inf"), below)
            tl.store(pairs + wide * row + j, pack(rounded, rest), mask=valid)
            tl.store(tail + wide * row + j, below, mask=valid)
    if boundary is not None:
        tl.debug_barrier()  # c was stored by other warps
        if threshold is not None:
            delta = tl.load(threshold + bh)
        if delta is not None:
            delta = tl.cast(tl.cast(delta, tl.float32), tl.float64)
        for block in range(chunk * ROWS, blocks, chunks * ROWS):
            m = block + tl.arange(0, ROWS)
            first = tl.where(m < blocks, m * block_q, 0) + (length - queries)
            diagonal = first // block_k
            low = tl.zeros([ROWS], dtype=tl.int32)
            if delta is not None:
                high = diagonal
                c_row = tl.load(c + first)
                for _ in range(steps):
                    middle = (low + high) // 2
                    column = tl.load(c + tl.minimum(middle * block_k + (block_k - 1), length - 1))
                    searching = low < high
                    pruned = c_row - column < delta  # false for NaN: the block is kept
                    low = tl.where(searching & pruned, middle + 1, low)
                    high = tl.where(searching & (pruned == 0), middle, high)
            if seq_start is not None:
                low = tl.maximum(low, tl.minimum(earliest, length).to(tl.int32) // block_k)
            if window is not None:
                low = tl.maximum(low, tl.maximum(window_start(first, window), 0) // block_k)
            tl.store(boundary + wide * blocks + m, tl.minimum(low, diagonal), mask=m < blocks)


def read_gates(
    log_fgate, c=None, layout=None, grid=None, queries=0, threshold=None, seq_start=None, window_size=None
) -> tuple[Tensor, DecayTerms | None, Tensor | None]:
    """Computes c, its terms and the boundary from ``log_fgate`` (B, H, T) float32, any strides, or from c.

    Args:
        layout: (positions of a key tile, numbers from head to head) of the terms; None omits the terms.
        grid: (block_q, block_k) of the boundary of the last ``queries`` positions; None omits the boundary.
        threshold: delta, a float or (B, H) float32; None prunes nothing.

    Returns:
        c (B, H, T) float64, the terms, and the boundary (B, H, M) int32.
    """
    gates = c if log_fgate is None else log_fgate
    batch, heads, length = gates.shape
    pairs = tail = None
    if layout is not None:
        pairs = torch.empty((batch, heads, layout[1]), dtype=torch.int64, device=gates.device)
        # The kernels prefetch `tail` by one tile and so read one tile past its end.
        tail = torch.empty(pairs.numel() + 2 * layout[0], dtype=torch.float32, device=gates.device)
    terms = DecayTerms(pairs, tail)
    blocks, boundary, chunks = triton.cdiv(queries, grid[0]) if grid else 0, None, 1
    if grid is not None:
        boundary = torch.empty((batch, heads, blocks), dtype=torch.int32, device=gates.device)
    if log_fgate is None:
        chunks = triton.cdiv(length, _BLOCK) if grid is None else triton.cdiv(blocks, _ROWS)
    else:
        c = torch.empty(gates.shape, dtype=torch.float64, device=gates.device)
    delta, threshold = (threshold, None) if isinstance(threshold, float) else (None, threshold)
    if threshold is not None:  # a view of an argument would prevent replaying the pass
        threshold = threshold if threshold.shape == (batch, heads) else threshold.expand(batch, heads)
        threshold = threshold.contiguous()
    tile, row = layout or (16, 0)
    grid = grid or (1, 1)
    sizes = heads, chunks, length, row, queries, blocks, *grid, triton.cdiv(length, grid[1]).bit_length()
    if gates.numel() and chunks:
        given = (
            log_fgate,
            c,
            *terms,
            threshold,
            delta,
            seq_start,
            boundary,
            strides_of(gates),
            *sizes,
            window_size,
        )
        options = {"TILE": tile, "BLOCK": _BLOCK, "ROWS": _ROWS, "num_warps": 16}
        launch(_gates_kernel, (batch * heads * chunks,), *given, **options)
    return c, terms, boundary


def cumulative_log_fgate(log_fgate: Tensor) -> Tensor:
    """:func:`..decay.cumulative_log_fgate` of (B, H, T) float32, any strides."""
    return read_gates(log_fgate)[0]


def find_boundary(c, threshold, seqlen_q, block_q, block_k, seq_start=None, window_size=None) -> Tensor:
    """:func:`..boundary.find_boundary` with the same arguments, without a host synchronisation."""
    grid = (block_q, block_k)
    return read_gates(None, c.contiguous(), None, grid, seqlen_q, threshold, seq_start, window_size)[2]


def decay_terms(c: Tensor, seq_start: Tensor | None, tile: int, row: int | None = None) -> DecayTerms:
    """The terms of ``c`` (B, H, Tk) for key tiles of ``tile`` positions, with heads ``row`` numbers apart."""
    return read_gates(None, c, (tile, c.shape[2] if row is None else row), seq_start=seq_start)[1]


@triton.jit(do_not_specialize=["heads", "length"])
def _adjoint_kernel(dc, log_fgate, grad, strides, heads, length, BLOCK: tl.constexpr):
    bh = tl.program_id(0)
    log_fgate = head_of(log_fgate, bh // heads, bh % heads, strides, False)
    dc += bh.to(tl.int64) * length
    grad += bh.to(tl.int64) * length
    carry = tl.zeros([], dtype=tl.float64)
    blocks = tl.cdiv(length, BLOCK)
    for n in range(0, blocks):
        i = (blocks - 1 - n) * BLOCK + tl.arange(0, BLOCK)
        inside = i < length
        x = tl.load(dc + i, mask=inside, other=0.0).to(tl.float64)
        gate = tl.load(log_fgate + i.to(tl.int64) * strides.token, mask=inside, other=0.0)
        total = carry + tl.cumsum(x, 0, reverse=True)
        tl.store(grad + i, tl.where(gate < _FLOOR, 0.0, total).to(tl.float32), mask=inside)
        carry += tl.sum(x, 0)


def log_fgate_grad(dc: Tensor, log_fgate: Tensor) -> Tensor:
    """:func:`..decay.log_fgate_grad` of (B, H, T) float32; the result is contiguous."""
    grad = torch.empty(log_fgate.shape, dtype=log_fgate.dtype, device=log_fgate.device)
    batch, heads, length = log_fgate.shape
    if grad.numel():
        given = (dc.contiguous(), log_fgate, grad, strides_of(log_fgate), heads, length)
        launch(_adjoint_kernel, (batch * heads,), *given, BLOCK=_BLOCK, num_warps=16)
    return grad
