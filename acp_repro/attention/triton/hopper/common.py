"""What both sides share on the device."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
