"""The query side of the backward for Hopper: dQ, and the inputs of the key side.

The sums are those of :mod:`..backward`, in the same order. The docstring of the package explains the
schedule.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..differences import load_pair, pack, unpack
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
    numbers_in,
    rows_of_a_tile,
    store_tile,
)


@gluon.constexpr_function
def stages_of_v(stages, d):
    """Prefetched tiles of V: one less than of K with wide heads, for which shared memory is too small."""
    return stages - 1 if d > 64 else stages


@gluon.jit
def _multiply(
    stages,
    q_s,
    g_s,
    own,
    out,
    lse,
    dq,
    levels,
    queries,
    pairs,
    o_t,
    dq_t,
    start,
    count,
    row,
    earliest,
    seqlen,
    scale,
    sm_scale,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    L: gl.constexpr = layouts_of(ROWS, D)
    WIDE: gl.constexpr = D > 64
    V_STAGES: gl.constexpr = stages_of_v(STAGES, D)
    gl.static_assert(WIDE or STAGES >= 3)  # the loop waits for a tile before it frees the one two tiles back
    ROWWISE: gl.constexpr = rows_of_a_tile(ROWS, D)

    r = gl.arange(0, ROWS, gl.SliceLayout(1, ROWWISE))
    d = gl.arange(0, D, gl.SliceLayout(0, ROWWISE))
    present = gl.expand_dims(r < seqlen - row, 1)
    o_tile = gl.load(out + gl.expand_dims(r * o_t, 1) + gl.expand_dims(d, 0), mask=present, other=0.0)
    i = row + gl.arange(0, ROWS, L.rows)
    inside = i < seqlen
    level = gl.load(lse + i, mask=inside, other=float("inf"))
    # A row without keys has lse = -inf. With lse = +inf, its weights are 0.
    level = gl.where(level == float("-inf"), float("inf"), level)
    high_i, low_i = load_pair(pairs, i, inside)
    high_base, low_base = unpack(gl.load(pairs + row))
    since_first = (high_i - high_base) + (low_i - low_base)
    shifted = level - since_first
    pair_end = gl.load(pairs + gl.minimum((start + 1) * ROWS - 1, seqlen - 1))

    zero = gl.zeros([ROWS, ROWS], gl.float32, L.scores)
    parts = gl.sum(gl.reshape(zero, [ROWS, ROWS // 8, 8]), 1)
    dq_acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, L.sums))
    mbarrier.wait(own, 0)
    q_t = q_s.reshape([ROWS, D])
    g_t = g_s.reshape([ROWS, D])
    if not WIDE:  # in registers, where a product costs half of the shared memory's bandwidth
        q_t = q_t.load(L.own)
        g_t = g_t.load(L.own)
    mbarrier.wait(stages.full.index(0), 0)
    s = warpgroup_mma(
        q_t, stages.x.index(0).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    g_tile = g_s.reshape([ROWS, D]).load(ROWWISE)
    delta = gl.sum(o_tile.to(gl.float32) * g_tile.to(gl.float32), 1)
    delta = gl.convert_layout(delta, L.rows)
    s = warpgroup_mma_wait(0, [s])
    ds_left = gl.zeros([ROWS, ROWS], q_s.dtype, L.left)
    for n in range(count - 1):
        stage = n % STAGES
        k_t = stages.x.index(stage).reshape([ROWS, D])
        v_t = stages.y.index(n % V_STAGES).reshape([ROWS, D])
        dp = warpgroup_mma(g_t, v_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        bias = numbers_in(stages.numbers.index(n % V_STAGES), gl.float32, ROWS).load(L.columns)
        high_end, low_end = unpack(pair_end)
        gap = (high_base - high_end) + (low_base - low_end)
        pair_end = gl.load(pairs + gl.minimum((start + n + 2) * ROWS - 1, seqlen - 1))
        p = gl.exp2(s * scale + gl.expand_dims(bias, 0) - gl.expand_dims(shifted - gap, 1))
        following = (n + 1) % STAGES
        mbarrier.wait(stages.full.index(following), ((n + 1) // STAGES) & 1)
        s = warpgroup_mma(
            q_t,
            stages.x.index(following).reshape([ROWS, D]).permute([1, 0]),
            zero,
            use_acc=False,
            is_async=True,
        )
        dp_sum, dq_sum, ds_left = warpgroup_mma_wait(1, [dp, dq_acc, ds_left])
        if WIDE:  # the product with this V and those with the previous K have finished
            mbarrier.arrive(stages.empty.index(n % V_STAGES))
        else:  # the products with the previous tile have finished
            mbarrier.arrive(stages.empty.index((n + STAGES - 1) % STAGES), pred=n > 0)
        ds = p * (dp_sum - gl.expand_dims(delta, 1))
        parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
        ds_left = gl.convert_layout(ds.to(q_s.dtype), L.left)
        dq_acc = warpgroup_mma(ds_left, k_t, dq_sum, is_async=True)
        s = warpgroup_mma_wait(1, [s])

    # The last tile is the diagonal: every mask, and differences of c that are exact near 0.
    final = (count - 1) % STAGES
    k_t = stages.x.index(final).reshape([ROWS, D])
    v_t = stages.y.index((count - 1) % V_STAGES).reshape([ROWS, D])
    dp = warpgroup_mma(g_t, v_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    j = row + gl.arange(0, ROWS, L.columns)
    high_j, low_j = load_pair(pairs, j, j < seqlen)
    dq_sum, dp_sum, ds_left = warpgroup_mma_wait(0, [dq_acc, dp, ds_left])
    scores, kept = diagonal_scores(s, scale, i, high_i, low_i, j, high_j, low_j, 1)
    kept = kept & gl.expand_dims((j >= earliest) & (j < seqlen), 0)
    p = gl.exp2(gl.where(kept, scores - gl.expand_dims(level, 1), float("-inf")))
    ds = p * (dp_sum - gl.expand_dims(delta, 1))
    parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
    dq_sum = warpgroup_mma(gl.convert_layout(ds.to(q_s.dtype), L.left), k_t, dq_sum)

    store_tile(dq, dq_sum * sm_scale, dq_t, seqlen - row, ROWS, D)
    delta += gl.convert_layout(gl.sum(parts, 1), L.rows)
    gl.store(levels + i, pack(level, delta), mask=inside)
    gl.store(queries + i, pack(-shifted, delta), mask=inside)


@gluon.jit(do_not_specialize=COUNTS)
def query_side_kernel(
    q,
    k,
    v,
    dout,
    tail,
    out,
    lse,
    dq,
    levels,
    queries,
    pairs,
    boundary,
    seq_start,
    packed,
    o_strides,
    dq_strides,
    batch_heads,
    heads,
    head_group,
    seqlen,
    seqlen_k,
    padded_q,
    padded,
    row_blocks,
    scale,
    sm_scale,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    SHARED: gl.constexpr,
    STAGES: gl.constexpr,
):
    tiles = gl.cdiv(seqlen, ROWS)
    bh, tile = share_of_work(batch_heads, tiles, head_group)
    tile = tiles - 1 - tile  # the last rows, which have the most keys, start first
    row = tile * ROWS
    b = bh // heads
    h = bh % heads
    kv_h = h // SHARED
    V_STAGES: gl.constexpr = stages_of_v(STAGES, D)

    k_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [V_STAGES, 1, 1, ROWS, D], q.layout)
    q_s = gl.allocate_shared_memory(q.dtype, [1, 1, ROWS, D], q.layout)
    g_s = gl.allocate_shared_memory(q.dtype, [1, 1, ROWS, D], q.layout)
    numbers_s = gl.allocate_shared_memory(gl.float32, [V_STAGES, ROWS], tail.layout)
    full, empty, own = make_barriers(STAGES, 1)
    stages = Stages(k_s, v_s, numbers_s, full, empty)
    mbarrier.expect(own, 4 * ROWS * D)
    copy_tile(q, [b, h, row, 0], own, q_s)
    copy_tile(dout, [b, h, row, 0], own, g_s)

    wide = bh.to(gl.int64)
    start, earliest = first_key_tile(
        boundary, seq_start, bh, b, row, seqlen_k, row_blocks, BLOCK_Q, BLOCK_K, ROWS
    )
    shift = seqlen_k - seqlen  # a multiple of ROWS
    diagonal = (row + shift) // ROWS
    start = gl.minimum(start, diagonal)
    count = diagonal + 1 - start
    key_b, origin, _ = find_keys(b, packed)
    source = Source(k, v, tail, key_b, kv_h, bh * padded, start, origin)
    for each in gl.static_range(V_STAGES):
        fetch(each, each < count, source, stages, None, ROWS, D, STAGES, V_STAGES, True)
    out = head_of(out, b, h, o_strides, False) + row.to(gl.int64) * o_strides.token
    dq = head_of(dq, b, h, dq_strides, False) + row.to(gl.int64) * dq_strides.token
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    stages,
                    q_s,
                    g_s,
                    own,
                    out,
                    lse + (wide * seqlen - shift),
                    dq,
                    levels + (wide * padded_q - shift),
                    queries + (wide * padded_q - shift),
                    pairs + wide * padded,
                    o_strides.token,
                    dq_strides.token,
                    start,
                    count,
                    row + shift,
                    earliest,
                    seqlen_k,
                    scale,
                    sm_scale,
                    ROWS,
                    D,
                    STAGES,
                ),
            ),
            (copy_the_rest, (count, source, stages, None, ROWS, D, STAGES, V_STAGES, True)),
        ],
        [1],
        [24],
    )
