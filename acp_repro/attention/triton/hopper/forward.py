"""The forward for Hopper: 128 queries a program, in two groups of warps that share the tiles of keys.

The same sums as :mod:`..forward`: the tile on the diagonal comes first, and its maximum serves the row.
While one group takes exponentials, the other has products to do. A tile of which a row's sum leaves the range
is marked in ``redo``, and the portable kernel does it again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..differences import load_pair, unpack
from ..tiles import COUNTS, share_of_work
from .common import copy_tile, numbers_in, store_tile


@gluon.jit
def _tile_of(n, diagonal, start):
    """The n-th tile of keys: the two on the diagonal, the later one first, then from ``start`` up to them."""
    return gl.where(n < 2, diagonal + 1 - n, start + n - 2)


@gluon.jit
def _fetch(
    n,
    wanted,
    k,
    v,
    tail,
    k_s,
    v_s,
    numbers_s,
    full,
    b,
    h,
    at,
    diagonal,
    start,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    row = _tile_of(n, diagonal, start) * ROWS
    stage = n % STAGES
    bar = full.index(stage)
    mbarrier.expect(bar, 4 * ROWS * D + 4 * ROWS, pred=wanted)
    copy_tile(k, [b, h, row, 0], bar, k_s.index(stage), pred=wanted)
    copy_tile(v, [b, h, row, 0], bar, v_s.index(stage), pred=wanted)
    copy_tile(tail, [at + row], bar, numbers_s.index(stage), pred=wanted)


@gluon.jit
def _copy(
    count,
    k,
    v,
    tail,
    k_s,
    v_s,
    numbers_s,
    full,
    empty,
    b,
    h,
    at,
    diagonal,
    start,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    for n in range(STAGES, count):
        mbarrier.wait(empty.index(n % STAGES), (n // STAGES - 1) & 1)
        _fetch(n, True, k, v, tail, k_s, v_s, numbers_s, full, b, h, at, diagonal, start, ROWS, D, STAGES)


@gluon.jit
def _attend(
    k_s,
    v_s,
    numbers_s,
    q_s,
    own,
    full,
    empty,
    out,
    lse,
    redo,
    pairs,
    o_t,
    start,
    count,
    diagonal,
    earliest,
    seqlen,
    scale,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    ROOM: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """64 queries: those of tile ``diagonal + HALF``."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OWN: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)

    first = (diagonal + HALF) * ROWS
    i = first + gl.arange(0, ROWS, QUERIES)
    inside = i < seqlen
    high_i, low_i = load_pair(pairs, i, inside)
    high_base, low_base = unpack(gl.load(pairs + gl.minimum(first, seqlen - 1)))
    since_first = (high_i - high_base) + (low_i - low_base)
    zero = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    mbarrier.wait(own, 0)
    q_t = q_s.index(HALF).reshape([ROWS, D]).load(OWN)
    if HALF == 0:  # the later tile of the diagonal is not for these queries
        mbarrier.wait(full.index(0), 0)
        mbarrier.arrive(empty.index(0))
    else:  # before the start of padded rows stands what nobody may read
        count = gl.where(diagonal < start, 1, count)
    mbarrier.wait(full.index(1 - HALF), 0)
    s = warpgroup_mma(
        q_t, k_s.index(1 - HALF).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    j = first + gl.arange(0, ROWS, KEYS)
    high_j, low_j = load_pair(pairs, j, j < seqlen)
    s = warpgroup_mma_wait(0, [s])
    scores = s * scale
    scores += gl.expand_dims(low_i, 1) - gl.expand_dims(low_j, 0)
    scores += gl.expand_dims(high_i, 1) - gl.expand_dims(high_j, 0)
    kept = gl.expand_dims(i, 1) >= gl.expand_dims(j, 0)
    kept = kept & gl.expand_dims((j >= earliest) & (j < seqlen), 0)
    scores = gl.where(kept, scores, float("-inf"))
    m_i = gl.max(scores, 1)
    # A row with no key: any finite number will do, every exponent is -inf.
    m_finite = gl.where(m_i == float("-inf"), 0.0, m_i)
    p = gl.exp2((scores - gl.expand_dims(m_finite, 1)) - ROOM)
    parts = gl.sum(gl.reshape(p, [ROWS, ROWS // 8, 8]), 1)
    p_left = gl.convert_layout(p.to(q_s.dtype), LEFT)
    level = m_finite - since_first + ROOM
    begin = 2 - HALF
    pair_end = gl.load(pairs + (gl.minimum((_tile_of(begin, diagonal, start) + 1) * ROWS, seqlen) - 1))
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    for n in range(begin, count):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        s = warpgroup_mma(
            q_t, k_s.index(stage).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
        )
        acc = warpgroup_mma(p_left, v_s.index((n - 1) % STAGES).reshape([ROWS, D]), acc, is_async=True)
        bias = numbers_in(numbers_s.index(stage), gl.float32, ROWS).load(KEYS)
        high_end, low_end = unpack(pair_end)
        shifted = level - ((high_base - high_end) + (low_base - low_end))
        pair_end = gl.load(pairs + (gl.minimum((_tile_of(n + 1, diagonal, start) + 1) * ROWS, seqlen) - 1))
        s = warpgroup_mma_wait(1, [s])
        p = gl.exp2(s * scale + gl.expand_dims(bias, 0) - gl.expand_dims(shifted, 1))
        parts += gl.sum(gl.reshape(p, [ROWS, ROWS // 8, 8]), 1)
        acc, p_left = warpgroup_mma_wait(0, [acc, p_left])
        mbarrier.arrive(empty.index((n - 1) % STAGES))
        p_left = gl.convert_layout(p.to(q_s.dtype), LEFT)
    acc = warpgroup_mma(p_left, v_s.index((count - 1) % STAGES).reshape([ROWS, D]), acc)

    l_i = gl.convert_layout(gl.sum(parts, 1), QUERIES)
    gl.store(redo, gl.max(gl.where(inside & ((l_i < LIMIT) == 0), 1, 0), 0))
    of_acc: gl.constexpr = gl.SliceLayout(1, SUMS)
    whole = gl.convert_layout(gl.where(l_i == 0.0, 1.0, l_i), of_acc)
    # Of a row with no key, what stands there may be no number.
    none = gl.convert_layout(l_i == 0.0, of_acc)
    result = gl.where(gl.expand_dims(none, 1), 0.0, acc / gl.expand_dims(whole, 1))
    store_tile(out, result, o_t, seqlen - first, ROWS, D)
    gl.store(lse + i, m_i + gl.log2(l_i * 2.0**ROOM), mask=inside)


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q,
    k,
    v,
    tail,
    out,
    lse,
    redo,
    pairs,
    boundary,
    seq_start,
    o_b,
    o_h,
    o_t,
    batch_heads,
    heads,
    group,
    seqlen,
    padded,
    row_blocks,
    scale,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    SHARED: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BOUNDARY: gl.constexpr,
    HAS_START: gl.constexpr,
    ROOM: gl.constexpr,
):
    tiles = gl.cdiv(seqlen, 2 * ROWS)
    bh, tile = share_of_work(batch_heads, tiles, group)
    tile = tiles - 1 - tile  # the last rows, which have the most keys, start first
    diagonal = 2 * tile
    row = diagonal * ROWS
    b = bh // heads
    h = bh % heads
    kv_h = h // SHARED

    k_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    q_s = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, D], q.layout)
    numbers_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], tail.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(own, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups of warps
    mbarrier.expect(own, 4 * ROWS * D)
    copy_tile(q, [b, h, row, 0], own, q_s.index(0))
    copy_tile(q, [b, h, row + ROWS, 0], own, q_s.index(1))

    wide = bh.to(gl.int64)
    start = 0
    earliest = 0
    if HAS_BOUNDARY:
        start = gl.load(boundary + wide * row_blocks + row // BLOCK_Q) * (BLOCK_K // ROWS)
    if HAS_START:
        earliest = gl.minimum(gl.load(seq_start + b), seqlen).to(gl.int32)
        start = gl.maximum(start, earliest // ROWS)
    count = 2 + gl.maximum(diagonal - start, 0)
    at = bh * padded
    for each in gl.static_range(STAGES):
        _fetch(
            each,
            each < count,
            k,
            v,
            tail,
            k_s,
            v_s,
            numbers_s,
            full,
            b,
            kv_h,
            at,
            diagonal,
            start,
            ROWS,
            D,
            STAGES,
        )
    out += b.to(gl.int64) * o_b + h.to(gl.int64) * o_h + row.to(gl.int64) * o_t
    lse += wide * seqlen
    pairs += wide * padded
    redo += (wide * tiles + tile) * 2
    LIMIT: gl.constexpr = 32768.0 if q.dtype == gl.float16 else 1e18
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    k_s,
                    v_s,
                    numbers_s,
                    q_s,
                    own,
                    full,
                    empty,
                    out,
                    lse,
                    redo,
                    pairs,
                    o_t,
                    start,
                    count,
                    diagonal,
                    earliest,
                    seqlen,
                    scale,
                    0,
                    ROWS,
                    D,
                    STAGES,
                    ROOM,
                    LIMIT,
                ),
            ),
            (
                _attend,
                (
                    k_s,
                    v_s,
                    numbers_s,
                    q_s,
                    own,
                    full,
                    empty,
                    out + o_t.to(gl.int64) * ROWS,
                    lse,
                    redo + 1,
                    pairs,
                    o_t,
                    start,
                    count,
                    diagonal,
                    earliest,
                    seqlen,
                    scale,
                    1,
                    ROWS,
                    D,
                    STAGES,
                    ROOM,
                    LIMIT,
                ),
            ),
            (
                _copy,
                (
                    count,
                    k,
                    v,
                    tail,
                    k_s,
                    v_s,
                    numbers_s,
                    full,
                    empty,
                    b,
                    kv_h,
                    at,
                    diagonal,
                    start,
                    ROWS,
                    D,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
