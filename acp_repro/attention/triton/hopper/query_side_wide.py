"""The query side's products for wide heads (head_dim 128); all around them is that of :mod:`.query_side`."""

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
from .common import numbers_in, rows_of_a_tile, store_tile


@gluon.jit
def multiply_wide(
    k_s,
    v_s,
    numbers_s,
    q_s,
    g_s,
    own,
    full,
    empty,
    out,
    lse,
    dq,
    row_sums,
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
    """``_multiply`` of :mod:`.query_side`, with q and dO in shared memory and V in one stage less than K."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(1, SCORES)
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
    V_STAGES: gl.constexpr = STAGES - 1
    ROWWISE: gl.constexpr = rows_of_a_tile(ROWS, D)

    r = gl.arange(0, ROWS, gl.SliceLayout(1, ROWWISE))
    d = gl.arange(0, D, gl.SliceLayout(0, ROWWISE))
    present = gl.expand_dims(r < seqlen - row, 1)
    o_tile = gl.load(out + gl.expand_dims(r * o_t, 1) + gl.expand_dims(d, 0), mask=present, other=0.0)
    i = row + gl.arange(0, ROWS, QUERIES)
    inside = i < seqlen
    level = gl.load(lse + i, mask=inside, other=float("inf"))
    # A row with no key has lse = -inf; its weights are 0, as those of a row with lse = +inf.
    level = gl.where(level == float("-inf"), float("inf"), level)
    high_i, low_i = load_pair(pairs, i, inside)
    high_base, low_base = unpack(gl.load(pairs + row))
    since_first = (high_i - high_base) + (low_i - low_base)
    shifted = level - since_first
    pair_end = gl.load(pairs + gl.minimum((start + 1) * ROWS - 1, seqlen - 1))

    zero = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    parts = gl.sum(gl.reshape(zero, [ROWS, ROWS // 8, 8]), 1)
    dq_acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, GRADS))
    mbarrier.wait(own, 0)
    q_t = q_s.reshape([ROWS, D])
    g_t = g_s.reshape([ROWS, D])
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(
        q_t, k_s.index(0).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    g_tile = g_t.load(ROWWISE)
    delta = gl.sum(o_tile.to(gl.float32) * g_tile.to(gl.float32), 1)
    delta = gl.convert_layout(delta, QUERIES)
    gl.store(levels + i, pack(level, delta), mask=inside)
    gl.store(queries + i, pack(since_first - level, delta), mask=inside)
    s = warpgroup_mma_wait(0, [s])
    ds_left = gl.zeros([ROWS, ROWS], q_s.dtype, LEFT)
    for n in range(count - 1):
        stage = n % STAGES
        k_t = k_s.index(stage).reshape([ROWS, D])
        v_t = v_s.index(n % V_STAGES).reshape([ROWS, D])
        dp = warpgroup_mma(g_t, v_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        bias = numbers_in(numbers_s.index(n % V_STAGES), gl.float32, ROWS).load(KEYS)
        high_end, low_end = unpack(pair_end)
        gap = (high_base - high_end) + (low_base - low_end)
        pair_end = gl.load(pairs + gl.minimum((start + n + 2) * ROWS - 1, seqlen - 1))
        p = gl.exp2(s * scale + gl.expand_dims(bias, 0) - gl.expand_dims(shifted - gap, 1))
        following = (n + 1) % STAGES
        mbarrier.wait(full.index(following), ((n + 1) // STAGES) & 1)
        s = warpgroup_mma(
            q_t, k_s.index(following).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
        )
        dp_sum, dq_sum, ds_left = warpgroup_mma_wait(1, [dp, dq_acc, ds_left])
        # The product with this V is done, and those with the K before.
        mbarrier.arrive(empty.index(n % V_STAGES))
        ds = p * (dp_sum - gl.expand_dims(delta, 1))
        parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
        ds_left = gl.convert_layout(ds.to(q_s.dtype), LEFT)
        dq_acc = warpgroup_mma(ds_left, k_t, dq_sum, is_async=True)
        s = warpgroup_mma_wait(1, [s])

    # The last tile is the diagonal: every mask, and differences of c that are exact near 0.
    final = (count - 1) % STAGES
    k_t = k_s.index(final).reshape([ROWS, D])
    v_t = v_s.index((count - 1) % V_STAGES).reshape([ROWS, D])
    dp = warpgroup_mma(g_t, v_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    j = row + gl.arange(0, ROWS, KEYS)
    high_j, low_j = load_pair(pairs, j, j < seqlen)
    dq_sum, dp_sum, ds_left = warpgroup_mma_wait(0, [dq_acc, dp, ds_left])
    scores = s * scale
    scores += gl.expand_dims(low_i, 1) - gl.expand_dims(low_j, 0)
    scores += gl.expand_dims(high_i, 1) - gl.expand_dims(high_j, 0)
    kept = gl.expand_dims(i, 1) >= gl.expand_dims(j, 0)
    kept = kept & gl.expand_dims((j >= earliest) & (j < seqlen), 0)
    p = gl.exp2(gl.where(kept, scores - gl.expand_dims(level, 1), float("-inf")))
    ds = p * (dp_sum - gl.expand_dims(delta, 1))
    parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
    dq_sum = warpgroup_mma(gl.convert_layout(ds.to(q_s.dtype), LEFT), k_t, dq_sum)

    store_tile(dq, dq_sum * sm_scale, dq_t, seqlen - row, ROWS, D)
    gl.store(row_sums + i, gl.convert_layout(gl.sum(parts, 1), QUERIES), mask=inside)
