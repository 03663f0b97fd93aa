"""The largest norm of each head's rows, for a threshold from norms (Section 3): one pass over q or k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, ready
from .tiles import addressable, load_rows, on_device_of, padded_head_dim

_ROWS = 128


@triton.jit(do_not_specialize=["heads", "tiles", "count"])
def _norm_kernel(
    x, largest, heads, tiles, count, x_b, x_h, x_t, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    bh = tl.program_id(0) // tiles
    x += (bh // heads).to(tl.int64) * x_b + (bh % heads).to(tl.int64) * x_h
    row = (tl.program_id(0) % tiles) * ROWS
    tile = load_rows(x, row, x_t, count, ROWS, D, BLOCK_D, True).to(tl.float32)
    square = tl.max(tl.sum(tile * tile, 1), 0)
    # Squares are not negative, so their bits as integers are in their order.
    tl.atomic_max(largest + bh, square.to(tl.int32, bitcast=True))


def largest_norms(x: Tensor) -> Tensor:
    """``max_i ||x_i||`` of each head, in float32.

    Args:
        x: (B, H, T, D), bfloat16, float16 or float32, any strides.

    Returns:
        (B, H) float32.
    """
    squares = torch.zeros(x.shape[:2], dtype=torch.int32, device=x.device)
    _find_squares(addressable(x), squares, ())
    return squares.view(torch.float32).sqrt()


@ready
def _find_squares(x: Tensor, squares: Tensor, constants: tuple) -> tuple:
    batch, heads, length, head_dim = x.shape
    tiles = triton.cdiv(length, _ROWS)
    with on_device_of(x):
        launch(
            _norm_kernel,
            (tiles * batch * heads,),
            x,
            squares,
            heads,
            tiles,
            length,
            *x.stride()[:3],
            ROWS=_ROWS,
            D=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            num_warps=4,
        )
    return ()
