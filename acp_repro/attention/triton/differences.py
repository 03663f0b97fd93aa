"""D_ij = c_i - c_j in float32 without losing the small differences (Section 2).

c reaches -1e9 (128k gates at the floor of -1e4), where adjacent float32 numbers differ by 64, while the
differences that decide an output are near 0. float64 is slow on most GPUs, above all its conversion to
float32. c is therefore converted once, in units of log 2, to ``high + low``, two float32 with 48 bits in
total. ``(high_i - high_j) + (low_i - low_j)`` equals D_ij up to one rounding and is exactly 0 for i = j.
This form costs three operations per entry and is used in the tiles that the diagonal crosses.

In a tile below the diagonal, D_ij splits at two reference positions:
``D_ij = (c_i - base_q) + (base_q - base_k) + (base_k - c_j)``, where base_q is c at the first position of the
query tile and base_k is c at the last position of the key tile. No term is positive, so no cancellation
occurs, and each term may be rounded. The first term is one number per row, the second one per tile, and the
third, ``tail``, one per key, which leaves a single operation per entry.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class DecayTerms(NamedTuple):
    """c in units of log 2."""

    # (B, H, row) int64: `high` in the lower 32 bits, `low` in the upper 32. The first Tk numbers of a row are
    # valid.
    pairs: Tensor
    # Flat (B, H, row) float32, padded by two tiles: c[last position of j's key tile] - c_j, at most 0; -inf
    # before seq_start.
    tail: Tensor


@triton.jit
def pack(x, y):
    """Two float32 packed into one int64, which one instruction loads."""
    below = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return below | (y.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def unpack(pair):
    x = pair.to(tl.int32).to(tl.float32, bitcast=True)
    y = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return x, y


@triton.jit
def load_pair(pairs, position, inside):
    """``high, low`` at ``position``; 0 where not ``inside``."""
    return unpack(tl.load(pairs + position, mask=inside, other=0))
