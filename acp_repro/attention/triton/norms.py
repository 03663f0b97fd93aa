"""A threshold from the largest norms of each head's rows of q and k (Section 3)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decay import SMALLEST_NORMAL, threshold_offset
from .launch import launch, repeat_launches
from .tiles import head_of, load_rows, make_addressable, padded_head_dim, strides_of

_ROWS = 128
# Rows with a norm below _SMALL are multiplied by _UP; the squares of their entries are then normal numbers.
_SMALL, _UP = tl.constexpr(2.0**-30), tl.constexpr(2.0**90)
_TINY = tl.constexpr(SMALLEST_NORMAL)
_SIZES = ["heads", "tiles", "count"]


@triton.jit
def _largest(bits):
    """The bits of the largest norm or square, from the bits of all: bits sort like numbers, NaN last."""
    return tl.max(bits & 0x7FFFFFFF, 0)


@triton.jit
def _largest_norm(tile):
    """The largest norm of a row of ``tile``, float32; NaN if any entry is NaN."""
    squares = tl.sum(tile * tile, 1).to(tl.int32, bitcast=True)
    return tl.sqrt_rn(_largest(squares).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=_SIZES)
def _norm_kernel(
    x, norms, heads, tiles, count, strides, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    bh = tl.program_id(0) // tiles
    x = head_of(x, bh // heads, bh % heads, strides, False)
    row = (tl.program_id(0) % tiles) * ROWS
    tile = load_rows(x, row, strides.token, count, ROWS, D, BLOCK_D, True).to(tl.float32)
    norm = _largest_norm(tile)
    if norm < _SMALL:
        # Squares may have underflowed. The tile is loaded again, which frees its registers in the meantime.
        tile = load_rows(x, row, strides.token, count, ROWS, D, BLOCK_D, True).to(tl.float32)
        norm = tl.maximum(_largest_norm(tile * _UP) * (1.0 / _UP), _TINY)
    tl.store(norms + tl.program_id(0), norm.to(tl.int32, bitcast=True))


@triton.jit
def _largest_of(norms, count, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    bits = tl.zeros([WIDTH], tl.int32)
    for first in range(0, count, WIDTH):
        bits = tl.maximum(bits, tl.load(norms + first + at, mask=first + at < count, other=0))
    return _largest(bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["q_tiles", "k_tiles"])
def _threshold_kernel(
    q_norms, k_norms, delta, q_tiles, k_tiles, factor, offset, SHARED: tl.constexpr, WIDTH: tl.constexpr
):
    bh = tl.program_id(0)
    longest_q = _largest_of(q_norms + bh * q_tiles, q_tiles, WIDTH)
    longest_k = _largest_of(k_norms + bh // SHARED * k_tiles, k_tiles, WIDTH)
    # The product is clamped to the smallest normal number, because an underflow would lower the bound.
    bound = tl.maximum(longest_q * longest_k, _TINY, propagate_nan=tl.PropagateNan.ALL) * factor
    tl.store(delta + bh, (-2.0 * bound - offset) * (1.0 + 2.0**-22))


def _tile_norms(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, H, tiles of T) int32: the bits of the largest norm in each."""
    batch, heads, length, head_dim = x.shape
    tiles = triton.cdiv(length, _ROWS)
    norms = torch.empty((batch, heads, tiles), dtype=torch.int32, device=x.device)
    launch(
        _norm_kernel,
        (tiles * batch * heads,),
        x,
        norms,
        heads,
        tiles,
        length,
        strides_of(x),
        ROWS=_ROWS,
        D=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=4,
    )
    return norms


def threshold_from_norms(q: Tensor, k: Tensor, factor: float, log_pruning_tolerance: float) -> Tensor:
    """delta (B, H) float32 of ``U = factor max_i ||q_i|| max_j ||k_j||`` and L = Tk, of 16 or 32 bits."""
    offset = threshold_offset(k.shape[2], log_pruning_tolerance)
    return _find_threshold(make_addressable(q), make_addressable(k), (factor, offset))[0]


@repeat_launches
def _find_threshold(q: Tensor, k: Tensor, constants: tuple[float, float]) -> tuple[Tensor]:
    delta = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    q_norms, k_norms = _tile_norms(q), _tile_norms(k)
    launch(
        _threshold_kernel,
        (delta.numel(),),
        q_norms,
        k_norms,
        delta,
        q_norms.shape[2],
        k_norms.shape[2],
        *constants,
        SHARED=q.shape[1] // k.shape[1],
        WIDTH=128,
        num_warps=1,
    )
    return (delta,)
