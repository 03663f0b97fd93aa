"""D_ij = c_i - c_j in float32 without losing the small differences (Section 2).

c reaches -1e9 (128k gates at the floor of -1e4), where float32 steps by 64, while the differences
that decide an output are near 0. And float64 is slow on most GPUs, above all its conversion to
float32. So c is rewritten once, in units of log 2, as ``high + low``, two float32 that hold 48
bits. ``(high_i - high_j) + (low_i - low_j)`` is then right to the rounding of D_ij itself and
exactly 0 for i = j. That costs three operations for every entry, so it serves the tiles that the
diagonal crosses.

In a tile wholly under the diagonal one base stands between the queries and the keys:
``D_ij = (c_i - base_q) + (base_q - base_k) + (base_k - c_j)`` with base_q = c of the query tile's
first position and base_k = c of the key tile's last. No term is positive, so nothing cancels, and
each may be rounded. The first is one number a row, the second one a tile, and the third, ``tail``,
one a key: a single operation for every entry.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class DecayTerms(NamedTuple):
    """c in units of log 2."""

    # (B, H, row) int64: the bits of `high` below, those of `low` above. Of a row's numbers the first Tk
    # count.
    pairs: Tensor
    # Flat (B, H, row) float32 and room for two tiles: c[last position of j's key tile] - c_j, at
    # most 0; -inf before seq_start.
    tail: Tensor


@triton.jit
def pack(x, y):
    """Two float32 as one int64: loaded together, they cost one instruction."""
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
