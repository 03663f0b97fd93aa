"""What both sides share on the device, and the names that Gluon has changed from Triton 3.6 to 3.9.

Triton's own helpers (``load_pair``, ``share_of_work``) work in Gluon as they are, where they make no
vectors: those need a layout here.
"""

from __future__ import annotations

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


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """(full, empty, own): of each stage, that its tile has come and that it may be filled again; and that
    the program's own tiles have come."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(own, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return full, empty, own


@gluon.jit
def fetch(
    n,
    first,
    wanted,
    x,
    y,
    numbers,
    x_s,
    y_s,
    numbers_s,
    full,
    b,
    h,
    at,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    Y_STAGES: gl.constexpr,
    UPWARDS: gl.constexpr,
):
    """Starts the copy of the n-th tile into its stage: rows of x and y, and their numbers.

    y and the numbers have stages of their own, ``Y_STAGES``, which are as many or one less.

    Keys count upwards from tile ``first`` and have one number of 4 bytes a row, from number ``at`` on;
    queries count downwards and have two, in row ``at`` of a matrix.
    """
    row = (first + n if UPWARDS else first - n) * ROWS
    stage = n % STAGES
    bar = full.index(stage)
    mbarrier.expect(bar, 4 * ROWS * D + (4 if UPWARDS else 8) * ROWS, pred=wanted)
    copy_tile(x, [b, h, row, 0], bar, x_s.index(stage), pred=wanted)
    copy_tile(y, [b, h, row, 0], bar, y_s.index(n % Y_STAGES), pred=wanted)
    if UPWARDS:
        copy_tile(numbers, [at + row], bar, numbers_s.index(n % Y_STAGES), pred=wanted)
    else:
        copy_tile(numbers, [at, 2 * row], bar, numbers_s.index(n % Y_STAGES), pred=wanted)


@gluon.jit
def copy_the_rest(
    first,
    count,
    x,
    y,
    numbers,
    x_s,
    y_s,
    numbers_s,
    full,
    empty,
    b,
    h,
    at,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    Y_STAGES: gl.constexpr,
    UPWARDS: gl.constexpr,
):
    """The copying warp: each stage is filled again as soon as its products are done."""
    for n in range(Y_STAGES, count):
        mbarrier.wait(empty.index(n % Y_STAGES), (n // Y_STAGES - 1) & 1)
        fetch(
            n,
            first,
            True,
            x,
            y,
            numbers,
            x_s,
            y_s,
            numbers_s,
            full,
            b,
            h,
            at,
            ROWS,
            D,
            STAGES,
            Y_STAGES,
            UPWARDS,
        )


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
