"""Device code that the Hopper kernels share, and the names that Gluon changed between Triton 3.6 and 3.9.

Helpers for Triton (``load_pair``, ``share_of_work``) work in Gluon if they create no vectors, because vectors
need a layout in Gluon.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # since 3.8; up to 3.7
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # since 3.9


@gluon.constexpr_function
def rows_of_a_tile(rows, d):
    """The layout for global memory accesses of a tile: 16 bytes per thread, or 8 for wide heads."""
    if d == 64:
        return gl.BlockedLayout([1, 8], [32 * 8 // d, d // 8], [4, 1], [1, 0])
    # A row belongs to the same four threads as in a product, because no shared memory is left for a larger
    # exchange. The four threads access 32 bytes of the row at once.
    assert rows == 64 and d == 128
    registers = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, d])


@gluon.jit
def numbers_in(memory, element: gl.constexpr, COUNT: gl.constexpr):
    """A vector of ``COUNT`` elements in shared memory that the copy engine has filled."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if _RENAMED:
        return memory.reinterpret(element, [COUNT], FLAT)
    else:
        return memory._reinterpret(element, [COUNT], FLAT)


class Stages(NamedTuple):
    """The shared memory of prefetched tiles, with one entry per stage."""

    x: Any  # keys or queries
    y: Any  # values or gradients of the output
    numbers: Any  # the terms of c in their scores
    full: Any  # barriers: the tile has arrived
    empty: Any  # barriers: the stage may be refilled


class Source(NamedTuple):
    """The sources of :class:`Stages`: descriptors for the copy engine, and the position of one head."""

    x: Any
    y: Any
    numbers: Any
    b: Any
    h: Any
    at: Any  # the first number of the head, or its row of numbers
    first: Any  # the first tile to copy
    origin: Any  # the row of x and y of position 0


class Layouts(NamedTuple):
    """The register layouts of four warps for the operands of a tile's products."""

    scores: Any
    sums: Any  # the accumulator of D columns
    left: Any  # the left operand of a product into it
    own: Any  # the left operand of a product into scores
    rows: Any  # one number for each row of the scores
    columns: Any


@gluon.constexpr_function
def layouts_of(size, d):
    scores = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d, 16])
    left, own = gl.DotOperandLayout(0, sums, 2), gl.DotOperandLayout(0, scores, 2)
    rows, columns = gl.SliceLayout(1, scores), gl.SliceLayout(0, scores)
    # Triton 3.6 passes a layout to a function only if it is marked as a constant.
    return Layouts(*map(gl.constexpr, (scores, sums, left, own, rows, columns)))


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """The barriers (full, empty, own).

    full: the tile of a stage has arrived. empty: all ``READERS``, which are groups of warps, have finished
    with it. own: the program's own tiles have arrived."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(own, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty, own


@gluon.jit
def first_key_tile(
    boundary,
    seq_start,
    bh,
    b,
    row,
    seqlen_k,
    row_blocks,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
):
    """The first key tile that the queries from ``row`` on read, and the first key that is not padding."""
    start = 0
    earliest = 0
    if boundary is not None:
        start = gl.load(boundary + bh.to(gl.int64) * row_blocks + row // BLOCK_Q) * (BLOCK_K // ROWS)
    if seq_start is not None:
        earliest = gl.minimum(gl.load(seq_start + b), seqlen_k).to(gl.int32)
        start = gl.maximum(start, earliest // ROWS)
    return start, earliest


@gluon.jit
def nth_tile(n, first, diagonal, UPWARDS: gl.constexpr):
    """The n-th tile to copy, counted from ``first`` upwards or downwards.

    With ``diagonal``, the order is that of the forward: the two tiles on the diagonal, the later one first,
    then the tiles from ``first`` up to them."""
    if diagonal is not None:
        return gl.where(n < 2, diagonal + 1 - n, first + n - 2)
    elif UPWARDS:
        return first + n
    else:
        return first - n


@gluon.jit
def fetch(
    n,
    wanted,
    source,
    stages,
    diagonal,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    Y_STAGES: gl.constexpr,
    UPWARDS: gl.constexpr,
):
    """Starts the copy of the n-th tile into its stage: rows of x and y, and their numbers.

    y and the numbers have ``Y_STAGES`` stages of their own, as many as x or one less.

    Key tiles are copied in increasing order with one 4-byte number per row, from number ``source.at`` on.
    Query tiles are copied in decreasing order with two numbers per row, in row ``source.at`` of a matrix.
    """
    row = nth_tile(n, source.first, diagonal, UPWARDS) * ROWS
    stage = n % STAGES
    bar = stages.full.index(stage)
    mbarrier.expect(bar, 4 * ROWS * D + (4 if UPWARDS else 8) * ROWS, pred=wanted)
    place = row + source.origin
    copy_tile(source.x, [source.b, source.h, place, 0], bar, stages.x.index(stage), pred=wanted)
    copy_tile(source.y, [source.b, source.h, place, 0], bar, stages.y.index(n % Y_STAGES), pred=wanted)
    if UPWARDS:
        copy_tile(source.numbers, [source.at + row], bar, stages.numbers.index(n % Y_STAGES), pred=wanted)
    else:
        copy_tile(source.numbers, [source.at, 2 * row], bar, stages.numbers.index(n % Y_STAGES), pred=wanted)


@gluon.jit
def copy_the_rest(
    count,
    source,
    stages,
    diagonal,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    Y_STAGES: gl.constexpr,
    UPWARDS: gl.constexpr,
):
    """The copying warp, which refills each stage as soon as its products have finished."""
    for n in range(Y_STAGES, count):
        mbarrier.wait(stages.empty.index(n % Y_STAGES), (n // Y_STAGES - 1) & 1)
        fetch(n, True, source, stages, diagonal, ROWS, D, STAGES, Y_STAGES, UPWARDS)


@gluon.jit
def diagonal_scores(s, scale, i, high_i, low_i, j, high_j, low_j, AXIS: gl.constexpr):
    """Scores with the exact difference of c at each entry, and the mask of visible keys. Numbers of a query
    are constant along ``AXIS``."""
    scores = s * scale
    scores += gl.expand_dims(low_i, AXIS) - gl.expand_dims(low_j, 1 - AXIS)
    scores += gl.expand_dims(high_i, AXIS) - gl.expand_dims(high_j, 1 - AXIS)
    return scores, gl.expand_dims(i, AXIS) >= gl.expand_dims(j, 1 - AXIS)


@gluon.jit
def store_tile(x, value, stride, count, ROWS: gl.constexpr, D: gl.constexpr):
    """Stores the first ``count`` rows of ``value`` at the pointer ``x``."""
    ROWWISE: gl.constexpr = rows_of_a_tile(ROWS, D)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, ROWWISE))
    d = gl.arange(0, D, gl.SliceLayout(0, ROWWISE))
    inside = gl.expand_dims(r < count, 1)
    gl.store(
        x + gl.expand_dims(r * stride, 1) + gl.expand_dims(d, 0),
        gl.convert_layout(value.to(x.dtype.element_ty), ROWWISE),
        mask=inside,
    )
