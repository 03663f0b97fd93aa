"""What both sides share on the device, and the names that Gluon has changed from Triton 3.6 to 3.9."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

copy_tile = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)  # from 3.8, until 3.7
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from 3.9


@gluon.jit
def numbers_in(memory, element: gl.constexpr, COUNT: gl.constexpr):
    """Shared memory that the copy engine filled, as a vector of ``COUNT`` elements."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if _RENAMED:
        return memory.reinterpret(element, [COUNT], FLAT)
    else:
        return memory._reinterpret(element, [COUNT], FLAT)


@gluon.jit
def pack(x, y):
    """Two float32 as one int64, x below."""
    below = x.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    return below | (y.to(gl.int32, bitcast=True).to(gl.int64) << 32)


@gluon.jit
def unpack(pair):
    x = pair.to(gl.int32).to(gl.float32, bitcast=True)
    y = (pair >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    return x, y


@gluon.jit
def load_pair(pairs, position, inside):
    """The two float32 at ``position``; 0 where not ``inside``."""
    return unpack(gl.load(pairs + position, mask=inside, other=0))
