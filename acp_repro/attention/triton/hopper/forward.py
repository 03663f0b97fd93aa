"""The forward for Hopper: 128 queries per program, in two groups of warps that share the key tiles.

The sums are those of :mod:`..forward`: the tile on the diagonal comes first, and its maximum is used for the
whole row. While one group computes exponentials, the other issues matrix products. If the sum of a row leaves
the range, the tile is marked in ``recompute_tiles``, and the portable kernel recomputes the tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..differences import load_pair, unpack
from ..tiles import COUNTS, find_keys, head_of, share_of_work
from .common import (
    Source,
    Stages,
    copy_the_rest,
    copy_tile,
    diagonal_scores,
    fetch,
    first_key_tile,
    layouts_of,
    make_barriers,
    nth_tile,
    numbers_in,
    store_tile,
)


@gluon.jit
def _attend(
    stages,
    q_s,
    own,
    out,
    lse,
    recompute_tiles,
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
    """One group of warps: the 64 queries of tile ``diagonal + HALF``."""
    L: gl.constexpr = layouts_of(ROWS, D)

    first = (diagonal + HALF) * ROWS
    i = first + gl.arange(0, ROWS, L.rows)
    inside = i < seqlen
    high_i, low_i = load_pair(pairs, i, inside)
    high_base, low_base = unpack(gl.load(pairs + gl.minimum(first, seqlen - 1)))
    since_first = (high_i - high_base) + (low_i - low_base)
    zero = gl.zeros([ROWS, ROWS], gl.float32, L.scores)
    mbarrier.wait(own, 0)
    q_t = q_s.index(HALF).reshape([ROWS, D]).load(L.own)
    if HALF == 0:  # these queries see no key of the later diagonal tile
        mbarrier.wait(stages.full.index(0), 0)
        mbarrier.arrive(stages.empty.index(0))
    else:  # keys before the start of padded rows are arbitrary
        count = gl.where(diagonal < start, 1, count)
    mbarrier.wait(stages.full.index(1 - HALF), 0)
    s = warpgroup_mma(
        q_t, stages.x.index(1 - HALF).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    j = first + gl.arange(0, ROWS, L.columns)
    high_j, low_j = load_pair(pairs, j, j < seqlen)
    s = warpgroup_mma_wait(0, [s])
    scores, kept = diagonal_scores(s, scale, i, high_i, low_i, j, high_j, low_j, 1)
    kept = kept & gl.expand_dims((j >= earliest) & (j < seqlen), 0)
    scores = gl.where(kept, scores, float("-inf"))
    m_i = gl.max(scores, 1)
    # A row without keys: any finite number works, because every exponent is -inf.
    m_finite = gl.where(m_i == float("-inf"), 0.0, m_i)
    p = gl.exp2((scores - gl.expand_dims(m_finite, 1)) - ROOM)
    parts = gl.sum(gl.reshape(p, [ROWS, ROWS // 8, 8]), 1)
    p_left = gl.convert_layout(p.to(q_s.dtype), L.left)
    level = m_finite - since_first + ROOM
    begin = 2 - HALF
    pair_end = gl.load(pairs + (gl.minimum((nth_tile(begin, start, diagonal, True) + 1) * ROWS, seqlen) - 1))
    acc = gl.zeros([ROWS, D], gl.float32, L.sums)
    for n in range(begin, count):
        stage = n % STAGES
        mbarrier.wait(stages.full.index(stage), (n // STAGES) & 1)
        s = warpgroup_mma(
            q_t, stages.x.index(stage).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
        )
        acc = warpgroup_mma(p_left, stages.y.index((n - 1) % STAGES).reshape([ROWS, D]), acc, is_async=True)
        bias = numbers_in(stages.numbers.index(stage), gl.float32, ROWS).load(L.columns)
        high_end, low_end = unpack(pair_end)
        shifted = level - ((high_base - high_end) + (low_base - low_end))
        pair_end = gl.load(
            pairs + (gl.minimum((nth_tile(n + 1, start, diagonal, True) + 1) * ROWS, seqlen) - 1)
        )
        s = warpgroup_mma_wait(1, [s])
        p = gl.exp2(s * scale + gl.expand_dims(bias, 0) - gl.expand_dims(shifted, 1))
        parts += gl.sum(gl.reshape(p, [ROWS, ROWS // 8, 8]), 1)
        acc, p_left = warpgroup_mma_wait(0, [acc, p_left])
        mbarrier.arrive(stages.empty.index((n - 1) % STAGES))
        p_left = gl.convert_layout(p.to(q_s.dtype), L.left)
    acc = warpgroup_mma(p_left, stages.y.index((count - 1) % STAGES).reshape([ROWS, D]), acc)

    l_i = gl.convert_layout(gl.sum(parts, 1), L.rows)
    gl.store(recompute_tiles, gl.max(gl.where(inside & ((l_i < LIMIT) == 0), 1, 0), 0))
    of_acc: gl.constexpr = gl.SliceLayout(1, L.sums)
    whole = gl.convert_layout(gl.where(l_i == 0.0, 1.0, l_i), of_acc)
    # In a row without keys, the accumulator may be NaN.
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
    recompute_tiles,
    pairs,
    boundary,
    seq_start,
    packed,
    o_strides,
    batch_heads,
    heads,
    head_group,
    seqlen,
    seqlen_k,
    padded,
    row_blocks,
    scale,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    SHARED: gl.constexpr,
    STAGES: gl.constexpr,
    ROOM: gl.constexpr,
):
    tiles = gl.cdiv(seqlen, 2 * ROWS)
    bh, tile = share_of_work(batch_heads, tiles, head_group)
    tile = tiles - 1 - tile  # the last rows, which have the most keys, start first
    row = 2 * tile * ROWS
    shift = seqlen_k - seqlen  # a multiple of ROWS
    diagonal = (row + shift) // ROWS
    b = bh // heads
    h = bh % heads
    kv_h = h // SHARED

    k_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    q_s = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, D], q.layout)
    numbers_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], tail.layout)
    full, empty, own = make_barriers(STAGES, 2)
    stages = Stages(k_s, v_s, numbers_s, full, empty)
    mbarrier.expect(own, 4 * ROWS * D)
    copy_tile(q, [b, h, row, 0], own, q_s.index(0))
    copy_tile(q, [b, h, row + ROWS, 0], own, q_s.index(1))

    wide = bh.to(gl.int64)
    start, earliest = first_key_tile(
        boundary, seq_start, bh, b, row, seqlen_k, row_blocks, BLOCK_Q, BLOCK_K, ROWS
    )
    count = 2 + gl.maximum(diagonal - start, 0)
    key_b, origin, _ = find_keys(b, packed)
    source = Source(k, v, tail, key_b, kv_h, bh * padded, start, origin)
    for each in gl.static_range(STAGES):
        fetch(each, each < count, source, stages, diagonal, ROWS, D, STAGES, STAGES, True)
    out = head_of(out, b, h, o_strides, False) + row.to(gl.int64) * o_strides.token
    lse += wide * seqlen - shift
    pairs += wide * padded
    recompute_tiles += (wide * tiles + tile) * 2
    LIMIT: gl.constexpr = 32768.0 if q.dtype == gl.float16 else 1e18
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    stages,
                    q_s,
                    own,
                    out,
                    lse,
                    recompute_tiles,
                    pairs,
                    o_strides.token,
                    start,
                    count,
                    diagonal,
                    earliest,
                    seqlen_k,
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
                    stages,
                    q_s,
                    own,
                    out + o_strides.token.to(gl.int64) * ROWS,
                    lse,
                    recompute_tiles + 1,
                    pairs,
                    o_strides.token,
                    start,
                    count,
                    diagonal,
                    earliest,
                    seqlen_k,
                    scale,
                    1,
                    ROWS,
                    D,
                    STAGES,
                    ROOM,
                    LIMIT,
                ),
            ),
            (copy_the_rest, (count, source, stages, diagonal, ROWS, D, STAGES, STAGES, True)),
        ],
        [4, 1],
        [240, 24],
    )
