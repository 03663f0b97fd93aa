"""What both sides share on the device, and the names that Gluon has changed from Triton 3.6 to 3.9.

Triton's own helpers (``load_pair``, ``share_of_work``) work in Gluon as they are, where they make no
vectors: those need a layout here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # from 3.8, until 3.7
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from 3.9


@gluon.constexpr_function
def rows_of_a_tile(rows, d):
    """How a tile is read from and written to global memory: 16 bytes a thread, or 8 of wide heads."""
    if d == 64:
        return gl.BlockedLayout([1, 8], [32 * 8 // d, d // 8], [4, 1], [1, 0])
    # Those four threads have a row that have it in a product too: no shared memory is left to exchange
    # more. They read and write 32 bytes of it at once.
    assert rows == 64 and d == 128
    registers = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, d])


@gluon.jit
def numbers_in(memory, element: gl.constexpr, COUNT: gl.constexpr):
    """Shared memory that the copy engine filled, as a vector of ``COUNT`` elements."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if _RENAMED:
        return memory.reinterpret(element, [COUNT], FLAT)
    else:
        return memory._reinterpret(element, [COUNT], FLAT)


class Stages(NamedTuple):
    """Shared memory of the tiles in flight, one entry for each stage."""

    x: Any  # keys or queries
    y: Any  # values or gradients of the output
    numbers: Any  # what c adds to their scores
    full: Any  # barriers: the tile has come
    empty: Any  # barriers: the stage may be filled again


class Source(NamedTuple):
    """What the copy engine reads for :class:`Stages`: descriptors, and where the rows of one head are."""

    x: Any
    y: Any
    numbers: Any
    b: Any
    h: Any
    at: Any  # the first number of the head, or its row of numbers
    first: Any  # the tile that comes first


class Layouts(NamedTuple):
    """How the registers of four warps hold the operands of a tile's products."""

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
    # Triton 3.6 gives a function no layout that is not marked as a constant.
    return Layouts(*map(gl.constexpr, (scores, sums, left, own, rows, columns)))


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """The barriers (full, empty, own).

    full: the tile of a stage has come. empty: all ``READERS``, groups of warps, are done with it. own: the
    program's own tiles have come."""
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
    seqlen,
    row_blocks,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
):
    """The first tile of keys that the queries from ``row`` on read, and the first key that is no padding."""
    start = 0
    earliest = 0
    if boundary is not None:
        start = gl.load(boundary + bh.to(gl.int64) * row_blocks + row // BLOCK_Q) * (BLOCK_K // ROWS)
    if seq_start is not None:
        earliest = gl.minimum(gl.load(seq_start + b), seqlen).to(gl.int32)
        start = gl.maximum(start, earliest // ROWS)
    return start, earliest


@gluon.jit
def nth_tile(n, first, diagonal, UPWARDS: gl.constexpr):
    """The n-th tile to copy: from ``first`` on, up or down.

    With ``diagonal`` in the forward's order: the two tiles on the diagonal, the later one first, then from
    ``first`` up to them."""
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

    y and the numbers have stages of their own, ``Y_STAGES``, which are as many or one less.

    Keys count upwards and have one number of 4 bytes a row, from number ``source.at`` on; queries count
    downwards and have two, in row ``source.at`` of a matrix.
    """
    row = nth_tile(n, source.first, diagonal, UPWARDS) * ROWS
    stage = n % STAGES
    bar = stages.full.index(stage)
    mbarrier.expect(bar, 4 * ROWS * D + (4 if UPWARDS else 8) * ROWS, pred=wanted)
    copy_tile(source.x, [source.b, source.h, row, 0], bar, stages.x.index(stage), pred=wanted)
    copy_tile(source.y, [source.b, source.h, row, 0], bar, stages.y.index(n % Y_STAGES), pred=wanted)
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
    """The copying warp: each stage is filled again as soon as its products are done."""
    for n in range(Y_STAGES, count):
        mbarrier.wait(stages.empty.index(n % Y_STAGES), (n // Y_STAGES - 1) & 1)
        fetch(n, True, source, stages, diagonal, ROWS, D, STAGES, Y_STAGES, UPWARDS)


@gluon.jit
def diagonal_scores(s, scale, i, high_i, low_i, j, high_j, low_j, AXIS: gl.constexpr):
    """Scores with the exact difference of c at each entry, and where the query sees the key. What is of one
    query is the same along ``AXIS``."""
    scores = s * scale
    scores += gl.expand_dims(low_i, AXIS) - gl.expand_dims(low_j, 1 - AXIS)
    scores += gl.expand_dims(high_i, AXIS) - gl.expand_dims(high_j, 1 - AXIS)
    return scores, gl.expand_dims(i, AXIS) >= gl.expand_dims(j, 1 - AXIS)


@gluon.jit
def store_tile(x, value, stride, count, ROWS: gl.constexpr, D: gl.constexpr):
    """The first ``count`` rows of ``value`` to where ``x`` points."""
    ROWWISE: gl.constexpr = rows_of_a_tile(ROWS, D)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, ROWWISE))
    d = gl.arange(0, D, gl.SliceLayout(0, ROWWISE))
    inside = gl.expand_dims(r < count, 1)
    gl.store(
        x + gl.expand_dims(r * stride, 1) + gl.expand_dims(d, 0),
        gl.convert_layout(value.to(x.dtype.element_ty), ROWWISE),
        mask=inside,
    )
