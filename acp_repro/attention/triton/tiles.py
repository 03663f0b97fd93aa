"""Code that the kernels share: tile sizes, launch helpers, and the loads of one tile.

Two sizes differ. The *grid* ``(block_q, block_k)`` decides which entries are pruned. It is part of the result
and therefore the same in both passes and on every device. A *tile* is computed in one step of a kernel. Its
size divides the block of the grid and affects speed only.
"""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import boundary

# Scores and the logarithms of their sums are in units of log 2, because GPUs have exp2 but not exp.
LOG2E = tl.constexpr(1.4426950408889634)
# Arguments that no alignment depends on, so one compiled kernel serves all their values.
COUNTS = [
    "batch_heads",
    "heads",
    "head_group",
    "row_tiles",
    "row_blocks",
    "key_rows",
    "chunks",
    "tile",
    "window",
]
# Heads whose tiles are launched together (`share_of_work`). On an H100, forward and backward over
# 192 heads of 4,096 positions took 2.8 ms with all of them together, and 2.0 ms with 12 or 24.
HEAD_GROUP = 12
# The token stride, in elements, from which on offsets inside a tile of up to 256 rows overflow int32.
FAR = 2**23


class Strides(NamedTuple):
    """The strides of a tensor (B, H, T, ...) along batch, heads and tokens, in elements."""

    batch: int
    head: int
    token: int


class Tile(NamedTuple):
    """One kernel's step: ``rows`` queries by ``columns`` keys, and how it is launched."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None  # the limit per thread: with fewer, more programs share a multiprocessor

    def options(self, device: torch.device) -> dict[str, int]:
        """The launch options of a kernel that runs this tile."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers and device.type == "cuda" and torch.version.hip is None:
            options["maxnreg"] = self.registers
        return options


class Tiles(NamedTuple):
    forward: Tile
    query_side: Tile
    key_side: Tile


# By padded head dimension, for devices with 220 KB of shared memory per block (Hopper and later).
_LARGE = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
}
# For other devices, down to 64 KB per block (float32 with 256 dimensions: 66 KB).
_SMALL = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    256: Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
}
# float32 products do not run on tensor cores, and large tiles spill registers.
_FLOAT32 = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
    256: Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


def room_for(q: Tensor, sm_scale: float) -> float:
    """The exponent ``room``: sums of the forward start at ``2**-room`` and may grow to 1e18.

    The headroom admits scores above those of the diagonal. It costs bfloat16 and float32 no precision, also
    in products with values down to 1e-30; float16 overflows at 65504. With the usual scale no headroom is
    needed, and it made the kernel 5 % slower for heads of 128.
    """
    return 32.0 if sm_scale * q.shape[-1] ** 0.5 > 2 and q.dtype != torch.float16 else 0.0


def padded_head_dim(head_dim: int) -> int:
    """The padded size of the second axis of a tile: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def tiles_for(q: Tensor, block_q: int, block_k: int) -> Tiles:
    """The tile sizes for these inputs: powers of two, reduced until they divide the block of the grid."""
    if block_q % 16 or block_k % 16:
        raise ValueError(
            "block_q and block_k must be multiples of 16 (the least that tl.dot takes), got "
            f"{block_q}, {block_k}"
        )
    table = _LARGE if _shared_memory(q.device) >= 220_000 else _SMALL
    if q.dtype == torch.float32:
        table = _FLOAT32
    tiles = table[max(64, padded_head_dim(q.shape[-1]))]
    return Tiles(
        *(t._replace(rows=math.gcd(t.rows, block_q), columns=math.gcd(t.columns, block_k)) for t in tiles)
    )


def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


def can_stream(*tensors: Tensor) -> bool:
    """Whether the bulk copy engine (TMA; Hopper and later) can read these: alignment, strides, dtype."""
    x = tensors[0]
    if x.device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(x.device)[0] < 9 or x.dtype.itemsize != 2:
        return False
    return x.shape[-1] == padded_head_dim(x.shape[-1]) and all(map(is_streamable, tensors))


def is_streamable(x: Tensor) -> bool:
    """Whether rows of 16-bit numbers do not overlap and start at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in outer_strides(x))


def outer_strides(x: Tensor) -> list[int]:
    """The strides of all but the last dimension; that of a dimension of size 1 has no meaning."""
    return [8 if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]


def strides_of(x: Tensor) -> Strides:
    """The strides of the first three dimensions of ``x``."""
    return Strides(*x.stride()[:3])


def describe_stream(x: Tensor, rows: int, descriptors: bool):
    """The argument of a kernel for a matrix that it reads in tiles of ``rows``."""
    if not descriptors:
        return x
    return TensorDescriptor(x, list(x.shape), [*outer_strides(x), 1], [1, 1, rows, x.shape[-1]])


def enter_device(x: Tensor) -> contextlib.AbstractContextManager:
    """A context that makes the device of the inputs the current one, on which Triton launches."""
    if x.device.type != "cuda" or torch.cuda.current_device() == x.device.index:
        return _STAY  # cheaper than a new context
    return torch.cuda.device(x.device)


_STAY = contextlib.nullcontext()


def make_addressable(x: Tensor) -> Tensor:
    """``x`` (B, H, T, D), copied if its last stride is not 1 or offsets inside a tile do not fit int32."""
    return x if _is_addressable(x) else x.contiguous()


def allocate_rows(x: Tensor) -> Tensor:
    """A tensor to which kernels can write ``x`` (B, H, T, D): ``x`` itself if it is addressable."""
    return x if _is_addressable(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _is_addressable(x: Tensor) -> bool:
    return x.stride(-1) == 1 and x.stride(2) < FAR


@triton.jit
def load_rows(
    x, row, stride, count, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Rows ``row .. row + ROWS`` of a (count, D) matrix as (ROWS, BLOCK_D); 0 past D, and past
    ``count`` where MASKED. The row's offset is int64, the offset inside the tile is int32."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    pointers = x + tl.cast(row, tl.int64) * stride + (r[:, None] * stride + d[None, :])
    if MASKED:
        if D == BLOCK_D:
            return tl.load(pointers, mask=(r < count - row)[:, None], other=0.0)
        else:
            inside = (r < count - row)[:, None] & (d < D)[None, :]
            return tl.load(pointers, mask=inside, other=0.0)
    elif D == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)


@triton.jit
def share_of_work(batch_heads, tiles, head_group):
    """(head, tile) of this program: a swizzle of the grid over groups of ``head_group`` heads. Within a
    group, programs are ordered by tile, so that the tiles with most work start first. Concurrent programs
    read few heads and find their rows in the L2 cache."""
    pid = tl.program_id(0)
    first = pid // (head_group * tiles) * head_group
    size = tl.minimum(batch_heads - first, head_group)
    pid -= first * tiles
    return first + pid % size, pid // size


@triton.jit
def head_of(x, b, h, strides, DESCRIPTOR: tl.constexpr):
    """A pointer to the rows of one head; a descriptor is returned unchanged."""
    if DESCRIPTOR:
        return x
    else:
        return x + (b.to(tl.int64) * strides.batch + h.to(tl.int64) * strides.head)


@triton.jit
def find_keys(b, packed):
    """The batch index of the keys of batch row ``b``, the row of key 0 there, and the first key, which are
    ``b``, 0 and 0 unless the keys are ``packed`` (:func:`.dispatch.forward`)."""
    origin = 0
    first = 0
    if packed is not None:
        origin = tl.load(packed + b * 2).to(tl.int32)
        first = tl.load(packed + b * 2 + 1).to(tl.int32)
        b = b * 0
    return b, origin, first


@triton.jit
def stream_rows(
    x,
    b,
    h,
    row,
    stride,
    count,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """:func:`load_rows` in a loop, through the bulk copy engine if ``x`` is a descriptor: addresses then need
    no registers, and rows past the end are read as 0."""
    if DESCRIPTOR:
        return x.load([b, h, row, 0]).reshape([ROWS, BLOCK_D])
    else:
        return load_rows(x, row, stride, count, ROWS, D, BLOCK_D, MASKED)


@triton.jit
def store_rows(x, value, row, stride, count, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores rows, the inverse of :func:`load_rows`, but none past ``count`` or D."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    pointers = x + tl.cast(row, tl.int64) * stride + (r[:, None] * stride + d[None, :])
    inside = (r < count - row)[:, None] & (d < D)[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=inside)


# Triton's interpreter multiplies bfloat16 tiles as integers, so they are converted to float32 there.
UPCAST = tl.constexpr(not isinstance(load_rows, triton.JITFunction))


@triton.jit
def product(x, y, acc):
    """``x @ y + acc`` in float32; float32 operands are multiplied as such, never as TF32."""
    if UPCAST:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")


# The edges of a window. The interpreter needs plain functions.
window_start, window_end = (
    edge if UPCAST.value else triton.jit(edge) for edge in (boundary.window_start, boundary.window_end)
)
