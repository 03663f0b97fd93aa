"""The key side's products for wide heads (head_dim 128); all around them is that of :mod:`.key_side`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..differences import unpack
from .common import numbers_in, store_tile


@gluon.jit
def multiply_wide(
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
    """``_multiply`` of :mod:`.key_side` for wide heads, whose accumulators fill half of the registers.

    None are left for the next tile's scores: the products of another program fill the time that exponentials
    take. What is loaded from shared memory is loaded late, and addresses are found late, for the same reason.
    """
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
    dk_acc = gl.zeros([ROWS, D], gl.float32, GRADS)
    dv_acc = gl.zeros([ROWS, D], gl.float32, GRADS)
    for n in range(count - 1):
        stage = n % STAGES
        # Always 0, but not to the compiler, which would keep what describes these in registers.
        k_t = k_s.index(n >> 30).reshape([ROWS, D])
        v_t = v_s.index(n >> 30).reshape([ROWS, D])
        q_t = q_s.index(stage).reshape([ROWS, D])
        g_t = g_s.index(stage).reshape([ROWS, D])
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        s = warpgroup_mma(k_t, q_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        high_first, low_first = unpack(gl.load(pairs + (end - 1 - n) * ROWS))
        gap = (high_first - high_base) + (low_first - low_base)
        s = warpgroup_mma_wait(1, [s])
        numbers = numbers_in(numbers_s.index(stage), gl.int64, ROWS)
        shifted, unused = unpack(numbers.load(QUERIES))
        p = gl.exp2(s * scale + gl.expand_dims(shifted, 0) + gl.expand_dims(rise + gap, 1))
        p_left = gl.convert_layout(p.to(q_s.dtype), LEFT)
        dv_acc = warpgroup_mma(p_left, g_t, dv_acc, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        unused, delta = unpack(numbers.load(QUERIES))
        ds = p * (dp - gl.expand_dims(delta, 0))
        parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
        ds_left = gl.convert_layout(ds.to(q_s.dtype), LEFT)
        dk_acc = warpgroup_mma(ds_left, q_t, dk_acc, is_async=True)
        dk_acc, dv_acc, p_left, ds_left = warpgroup_mma_wait(0, [dk_acc, dv_acc, p_left, ds_left])
        mbarrier.arrive(empty.index(stage))

    # The last tile is the diagonal: every mask, and differences of c that are exact near 0.
    final = (count - 1) % STAGES
    k_t = k_s.index(0).reshape([ROWS, D])
    v_t = v_s.index(0).reshape([ROWS, D])
    q_t = q_s.index(final).reshape([ROWS, D])
    g_t = g_s.index(final).reshape([ROWS, D])
    mbarrier.wait(full.index(final), ((count - 1) // STAGES) & 1)
    s = warpgroup_mma(k_t, q_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    j = column + gl.arange(0, ROWS, KEYS)
    i = column + gl.arange(0, ROWS, QUERIES)
    high_j, low_j = unpack(own_pairs.load(KEYS))
    high_i, low_i = unpack(own_pairs.load(QUERIES))
    level, unused = unpack(numbers_in(levels_s, gl.int64, ROWS).load(QUERIES))
    scores = s * scale
    scores += gl.expand_dims(low_i, 0) - gl.expand_dims(low_j, 1)
    scores += gl.expand_dims(high_i, 0) - gl.expand_dims(high_j, 1)
    kept = gl.expand_dims(i, 0) >= gl.expand_dims(j, 1)
    kept = kept & gl.expand_dims((j < seqlen) & (j >= earliest), 1) & gl.expand_dims(i < seqlen, 0)
    p = gl.exp2(gl.where(kept, scores - gl.expand_dims(level, 0), float("-inf")))
    p_left = gl.convert_layout(p.to(q_s.dtype), LEFT)
    dv_acc = warpgroup_mma(p_left, g_t, dv_acc, is_async=True)
    dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    dp, dv_sum, p_left = warpgroup_mma_wait(0, [dp, dv_acc, p_left])
    unused, delta = unpack(numbers_in(levels_s, gl.int64, ROWS).load(QUERIES))
    ds = p * (dp - gl.expand_dims(delta, 0))
    parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
    dk_sum = warpgroup_mma(gl.convert_layout(ds.to(q_s.dtype), LEFT), q_t, dk_acc)

    b = (bh // heads).to(gl.int64)
    h = (bh % heads).to(gl.int64)
    dk += b * dk_b + h * dk_h + column.to(gl.int64) * dk_t
    dv += b * dv_b + h * dv_h + column.to(gl.int64) * dv_t
    at = bh.to(gl.int64) * seqlen
    store_tile(dk, dk_sum * sm_scale, dk_t, seqlen - column, ROWS, D)
    store_tile(dv, dv_sum, dv_t, seqlen - column, ROWS, D)
    column_sum = gl.convert_layout(gl.sum(parts, 1), KEYS)
    gl.store(dc + at + j, -column_sum, mask=j < seqlen)
