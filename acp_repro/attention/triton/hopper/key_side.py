"""The key side of the backward for Hopper: dK, dV and the gradient of c.

The same sums as :mod:`..key_side`, over the query tiles from the last kept one up to
the diagonal; see the package's docstring for how.
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

from ..differences import unpack
from ..tiles import COUNTS, share_of_work
from .common import copy_the_rest, copy_tile, fetch, make_barriers, numbers_in, store_tile
from .key_side_wide import multiply_wide


@gluon.jit
def _multiply(
    q_s,
    g_s,
    numbers_s,
    k_s,
    v_s,
    pairs_s,
    levels_s,
    own,
    full,
    empty,
    dk,
    dv,
    dc,
    pairs,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    bh,
    heads,
    end,
    count,
    column,
    earliest,
    seqlen,
    scale,
    sm_scale,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    gl.static_assert(STAGES >= 3)  # a tile is waited for before the one two back is given free
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    KEYS: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)

    last = gl.minimum(column + ROWS, seqlen) - 1
    j = column + gl.arange(0, ROWS, KEYS)
    valid = (j < seqlen) & (j >= earliest)
    high_base, low_base = unpack(gl.load(pairs + last))
    own_pairs = numbers_in(pairs_s, gl.int64, ROWS)
    mbarrier.wait(own, 0)
    high_j, low_j = unpack(own_pairs.load(KEYS))
    rise = gl.where(valid, (high_base - high_j) + (low_base - low_j), float("-inf"))
    zero = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    parts = gl.sum(gl.reshape(zero, [ROWS, ROWS // 8, 8]), 1)
    dk_acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, GRADS))
    dv_acc = gl.zeros([ROWS, D], gl.float32, GRADS)
    pair_first = gl.load(pairs + (end - 1) * ROWS)
    k_t = k_s.index(0).reshape([ROWS, D])
    v_t = v_s.index(0).reshape([ROWS, D])
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(
        k_t, q_s.index(0).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, [s])
    ds_left = gl.zeros([ROWS, ROWS], q_s.dtype, LEFT)
    for n in range(count - 1):
        stage = n % STAGES
        q_t = q_s.index(stage).reshape([ROWS, D])
        g_t = g_s.index(stage).reshape([ROWS, D])
        dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        shifted, delta = unpack(numbers_in(numbers_s.index(stage), gl.int64, ROWS).load(QUERIES))
        high_first, low_first = unpack(pair_first)
        gap = (high_first - high_base) + (low_first - low_base)
        pair_first = gl.load(pairs + gl.maximum((end - 2 - n) * ROWS, 0))
        # Rows past the end are copied as zeros: p is at most 1 there, and their dO and Q are 0.
        p = gl.exp2(s * scale + gl.expand_dims(shifted, 0) + gl.expand_dims(rise + gap, 1))
        p_left = gl.convert_layout(p.to(q_s.dtype), LEFT)
        dv_acc = warpgroup_mma(p_left, g_t, dv_acc, is_async=True)
        dp_sum, dk_sum, ds_left = warpgroup_mma_wait(1, [dp, dk_acc, ds_left])
        following = (n + 1) % STAGES
        mbarrier.wait(full.index(following), ((n + 1) // STAGES) & 1)
        s = warpgroup_mma(
            k_t, q_s.index(following).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
        )
        # The products with the tile before are done.
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), pred=n > 0)
        ds = p * (dp_sum - gl.expand_dims(delta, 0))
        parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
        ds_left = gl.convert_layout(ds.to(q_s.dtype), LEFT)
        dk_acc = warpgroup_mma(ds_left, q_t, dk_sum, is_async=True)
        s, dv_acc, p_left = warpgroup_mma_wait(1, [s, dv_acc, p_left])

    # The last tile is the diagonal: every mask, and differences of c that are exact near 0.
    final = (count - 1) % STAGES
    q_t = q_s.index(final).reshape([ROWS, D])
    g_t = g_s.index(final).reshape([ROWS, D])
    dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    i = column + gl.arange(0, ROWS, QUERIES)
    high_i, low_i = unpack(own_pairs.load(QUERIES))
    level, delta = unpack(numbers_in(levels_s, gl.int64, ROWS).load(QUERIES))
    dk_sum, dp_sum, ds_left = warpgroup_mma_wait(0, [dk_acc, dp, ds_left])
    scores = s * scale
    scores += gl.expand_dims(low_i, 0) - gl.expand_dims(low_j, 1)
    scores += gl.expand_dims(high_i, 0) - gl.expand_dims(high_j, 1)
    kept = gl.expand_dims(i, 0) >= gl.expand_dims(j, 1)
    kept = kept & gl.expand_dims(valid, 1) & gl.expand_dims(i < seqlen, 0)
    p = gl.exp2(gl.where(kept, scores - gl.expand_dims(level, 0), float("-inf")))
    dv_sum = warpgroup_mma(gl.convert_layout(p.to(q_s.dtype), LEFT), g_t, dv_acc)
    ds = p * (dp_sum - gl.expand_dims(delta, 0))
    parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
    dk_sum = warpgroup_mma(gl.convert_layout(ds.to(q_s.dtype), LEFT), q_t, dk_sum)

    store_tile(dk, dk_sum * sm_scale, dk_t, seqlen - column, ROWS, D)
    store_tile(dv, dv_sum, dv_t, seqlen - column, ROWS, D)
    column_sum = gl.convert_layout(gl.sum(parts, 1), KEYS)
    gl.store(dc + j, -column_sum, mask=j < seqlen)


@gluon.jit(do_not_specialize=COUNTS)
def key_side_kernel(
    q,
    k,
    v,
    dout,
    queries,
    levels,
    own_pairs,
    dk,
    dv,
    dc,
    pairs,
    boundary,
    seq_start,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    batch_heads,
    heads,
    group,
    seqlen,
    padded,
    row_blocks,
    scale,
    sm_scale,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    SHARED: gl.constexpr,
    COUNT: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BOUNDARY: gl.constexpr,
    HAS_START: gl.constexpr,
):
    tiles = gl.cdiv(seqlen, ROWS)
    bh, tile = share_of_work(batch_heads, tiles, group)
    column = tile * ROWS  # the first keys, which have the most queries, start first
    b = bh // heads
    h = bh % heads

    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    g_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [1, 1, 1, ROWS, D], q.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [1, 1, 1, ROWS, D], q.layout)
    numbers_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 2 * ROWS], queries.layout)
    pairs_s = gl.allocate_shared_memory(gl.int32, [1, 2 * ROWS], queries.layout)
    levels_s = gl.allocate_shared_memory(gl.int32, [1, 2 * ROWS], queries.layout)
    full, empty, own = make_barriers(STAGES)
    mbarrier.expect(own, 4 * ROWS * D + 16 * ROWS)
    copy_tile(own_pairs, [bh, 2 * column], own, pairs_s)
    copy_tile(levels, [bh, 2 * column], own, levels_s)
    copy_tile(k, [b, h // SHARED, column, 0], own, k_s.index(0))
    copy_tile(v, [b, h // SHARED, column, 0], own, v_s.index(0))

    WIDE: gl.constexpr = D > 64
    wide = bh.to(gl.int64)
    end = tiles
    if HAS_BOUNDARY:
        boundary += wide * row_blocks
        rows = 0
        for chunk in range(0, row_blocks, COUNT):
            block = chunk + gl.arange(0, COUNT, gl.BlockedLayout([COUNT // 32], [32], [4], [0]))
            starts = gl.load(boundary + block, mask=block < row_blocks, other=2147483647)
            rows += gl.sum((starts <= column // BLOCK_K).to(gl.int32), 0)
        end = gl.minimum(tiles, rows * (BLOCK_Q // ROWS))
    earliest = 0
    if HAS_START:
        earliest = gl.load(seq_start + b).to(gl.int32)
        end = gl.where(gl.minimum(column + ROWS, seqlen) <= earliest, tile + 1, end)
    end = gl.maximum(end, tile + 1)
    count = end - tile
    for each in gl.static_range(STAGES):
        fetch(
            each,
            end - 1,
            each < count,
            q,
            dout,
            queries,
            q_s,
            g_s,
            numbers_s,
            full,
            b,
            h,
            bh,
            ROWS,
            D,
            STAGES,
            STAGES,
            False,
        )
    if not WIDE:
        dk += b.to(gl.int64) * dk_b + h.to(gl.int64) * dk_h + column.to(gl.int64) * dk_t
        dv += b.to(gl.int64) * dv_b + h.to(gl.int64) * dv_h + column.to(gl.int64) * dv_t
        dc += wide * seqlen
    gl.warp_specialize(
        [
            (
                multiply_wide if WIDE else _multiply,
                (
                    q_s,
                    g_s,
                    numbers_s,
                    k_s,
                    v_s,
                    pairs_s,
                    levels_s,
                    own,
                    full,
                    empty,
                    dk,
                    dv,
                    dc,
                    pairs + wide * padded,
                    dk_b,
                    dk_h,
                    dk_t,
                    dv_b,
                    dv_h,
                    dv_t,
                    bh,
                    heads,
                    end,
                    count,
                    column,
                    earliest,
                    seqlen,
                    scale,
                    sm_scale,
                    ROWS,
                    D,
                    STAGES,
                ),
            ),
            (
                copy_the_rest,
                (
                    end - 1,
                    count,
                    q,
                    dout,
                    queries,
                    q_s,
                    g_s,
                    numbers_s,
                    full,
                    empty,
                    b,
                    h,
                    bh,
                    ROWS,
                    D,
                    STAGES,
                    STAGES,
                    False,
                ),
            ),
        ],
        [1],
        [24],
    )
