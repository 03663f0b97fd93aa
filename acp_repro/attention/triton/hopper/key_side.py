"""The key side of the backward for Hopper: dK, dV and the gradient of c.

The sums are those of :mod:`..backward`, over the query tiles from the last kept one to the diagonal. The
docstring of the package explains the schedule.
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
from ..tiles import COUNTS, find_keys, head_of, share_of_work
from .common import (
    Source,
    Stages,
    copy_the_rest,
    copy_tile,
    diagonal_scores,
    fetch,
    layouts_of,
    make_barriers,
    numbers_in,
    store_tile,
)


@gluon.jit
def _open_column(pairs, pairs_s, own, column, earliest, seqlen, ROWS: gl.constexpr, D: gl.constexpr):
    """The initial values of both versions: j and the mask of valid keys; c of the tile's last key; the pairs
    of c in shared memory and in registers; the decay term of each key; and zeros for scores and column
    sums."""
    L: gl.constexpr = layouts_of(ROWS, D)
    last = gl.minimum(column + ROWS, seqlen) - 1
    j = column + gl.arange(0, ROWS, L.rows)
    valid = (j < seqlen) & (j >= earliest)
    high_base, low_base = unpack(gl.load(pairs + last))
    own_pairs = numbers_in(pairs_s, gl.int64, ROWS)
    mbarrier.wait(own, 0)
    high_j, low_j = unpack(own_pairs.load(L.rows))
    rise = gl.where(valid, (high_base - high_j) + (low_base - low_j), float("-inf"))
    zero = gl.zeros([ROWS, ROWS], gl.float32, L.scores)
    parts = gl.sum(gl.reshape(zero, [ROWS, ROWS // 8, 8]), 1)
    return j, valid, high_base, low_base, own_pairs, high_j, low_j, rise, zero, parts


@gluon.jit
def _multiply(
    stages,
    k_s,
    v_s,
    pairs_s,
    row_pairs_s,
    levels_s,
    own,
    dk,
    dv,
    dc,
    pairs,
    dk_strides,
    dv_strides,
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
    gl.static_assert(STAGES >= 3)  # the loop waits for a tile before it frees the one two tiles back
    L: gl.constexpr = layouts_of(ROWS, D)
    j, valid, high_base, low_base, own_pairs, high_j, low_j, rise, zero, parts = _open_column(
        pairs, pairs_s, own, column, earliest, seqlen, ROWS, D
    )
    dk_acc = warpgroup_mma_init(gl.zeros([ROWS, D], gl.float32, L.sums))
    dv_acc = gl.zeros([ROWS, D], gl.float32, L.sums)
    pair_first = gl.load(pairs + (end - 1) * ROWS)
    k_t = k_s.index(0).reshape([ROWS, D])
    v_t = v_s.index(0).reshape([ROWS, D])
    mbarrier.wait(stages.full.index(0), 0)
    s = warpgroup_mma(
        k_t, stages.x.index(0).reshape([ROWS, D]).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, [s])
    ds_left = gl.zeros([ROWS, ROWS], stages.x.dtype, L.left)
    for n in range(count - 1):
        stage = n % STAGES
        q_t = stages.x.index(stage).reshape([ROWS, D])
        g_t = stages.y.index(stage).reshape([ROWS, D])
        dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        shifted, delta = unpack(numbers_in(stages.numbers.index(stage), gl.int64, ROWS).load(L.columns))
        high_first, low_first = unpack(pair_first)
        gap = (high_first - high_base) + (low_first - low_base)
        pair_first = gl.load(pairs + gl.maximum((end - 2 - n) * ROWS, 0))
        # Rows past the end are copied as zeros: their dO and Q are 0, and p is at most 1.
        p = gl.exp2(s * scale + gl.expand_dims(shifted, 0) + gl.expand_dims(rise + gap, 1))
        p_left = gl.convert_layout(p.to(stages.x.dtype), L.left)
        dv_acc = warpgroup_mma(p_left, g_t, dv_acc, is_async=True)
        dp_sum, dk_sum, ds_left = warpgroup_mma_wait(1, [dp, dk_acc, ds_left])
        following = (n + 1) % STAGES
        mbarrier.wait(stages.full.index(following), ((n + 1) // STAGES) & 1)
        s = warpgroup_mma(
            k_t,
            stages.x.index(following).reshape([ROWS, D]).permute([1, 0]),
            zero,
            use_acc=False,
            is_async=True,
        )
        # The products with the previous tile have finished.
        mbarrier.arrive(stages.empty.index((n + STAGES - 1) % STAGES), pred=n > 0)
        ds = p * (dp_sum - gl.expand_dims(delta, 0))
        parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
        ds_left = gl.convert_layout(ds.to(stages.x.dtype), L.left)
        dk_acc = warpgroup_mma(ds_left, q_t, dk_sum, is_async=True)
        s, dv_acc, p_left = warpgroup_mma_wait(1, [s, dv_acc, p_left])

    # The last tile is the diagonal: every mask, and differences of c that are exact near 0.
    final = (count - 1) % STAGES
    q_t = stages.x.index(final).reshape([ROWS, D])
    g_t = stages.y.index(final).reshape([ROWS, D])
    dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    i = (end - count) * ROWS + gl.arange(0, ROWS, L.columns)
    high_i, low_i = unpack(numbers_in(row_pairs_s, gl.int64, ROWS).load(L.columns))
    level, delta = unpack(numbers_in(levels_s, gl.int64, ROWS).load(L.columns))
    dk_sum, dp_sum, ds_left = warpgroup_mma_wait(0, [dk_acc, dp, ds_left])
    scores, kept = diagonal_scores(s, scale, i, high_i, low_i, j, high_j, low_j, 0)
    kept = kept & gl.expand_dims(valid, 1) & gl.expand_dims(i < seqlen, 0)
    p = gl.exp2(gl.where(kept, scores - gl.expand_dims(level, 0), float("-inf")))
    dv_sum = warpgroup_mma(gl.convert_layout(p.to(stages.x.dtype), L.left), g_t, dv_acc)
    ds = p * (dp_sum - gl.expand_dims(delta, 0))
    parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
    dk_sum = warpgroup_mma(gl.convert_layout(ds.to(stages.x.dtype), L.left), q_t, dk_sum)

    store_tile(dk, dk_sum * sm_scale, dk_strides.token, seqlen - column, ROWS, D)
    store_tile(dv, dv_sum, dv_strides.token, seqlen - column, ROWS, D)
    column_sum = gl.convert_layout(gl.sum(parts, 1), L.rows)
    gl.store(dc + j, -column_sum, mask=j < seqlen)


@gluon.jit
def _multiply_wide(
    stages,
    k_s,
    v_s,
    pairs_s,
    row_pairs_s,
    levels_s,
    own,
    dk,
    dv,
    dc,
    pairs,
    dk_strides,
    dv_strides,
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
    """``_multiply`` for wide heads, whose accumulators fill half of the registers.

    No registers are left for the scores of the next tile, so the products of another program overlap with the
    exponentials. For the same reason, loads from shared memory and address computations come late.
    """
    L: gl.constexpr = layouts_of(ROWS, D)
    j, valid, high_base, low_base, own_pairs, high_j, low_j, rise, zero, parts = _open_column(
        pairs, pairs_s, own, column, earliest, seqlen, ROWS, D
    )
    dk_acc = gl.zeros([ROWS, D], gl.float32, L.sums)
    dv_acc = gl.zeros([ROWS, D], gl.float32, L.sums)
    for n in range(count - 1):
        stage = n % STAGES
        # The index is always 0. A constant would let the compiler keep the descriptors in registers.
        k_t = k_s.index(n >> 30).reshape([ROWS, D])
        v_t = v_s.index(n >> 30).reshape([ROWS, D])
        q_t = stages.x.index(stage).reshape([ROWS, D])
        g_t = stages.y.index(stage).reshape([ROWS, D])
        mbarrier.wait(stages.full.index(stage), (n // STAGES) & 1)
        s = warpgroup_mma(k_t, q_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
        high_first, low_first = unpack(gl.load(pairs + (end - 1 - n) * ROWS))
        gap = (high_first - high_base) + (low_first - low_base)
        s = warpgroup_mma_wait(1, [s])
        numbers = numbers_in(stages.numbers.index(stage), gl.int64, ROWS)
        shifted, unused = unpack(numbers.load(L.columns))
        p = gl.exp2(s * scale + gl.expand_dims(shifted, 0) + gl.expand_dims(rise + gap, 1))
        p_left = gl.convert_layout(p.to(stages.x.dtype), L.left)
        dv_acc = warpgroup_mma(p_left, g_t, dv_acc, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        unused, delta = unpack(numbers.load(L.columns))
        ds = p * (dp - gl.expand_dims(delta, 0))
        parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
        ds_left = gl.convert_layout(ds.to(stages.x.dtype), L.left)
        dk_acc = warpgroup_mma(ds_left, q_t, dk_acc, is_async=True)
        dk_acc, dv_acc, p_left, ds_left = warpgroup_mma_wait(0, [dk_acc, dv_acc, p_left, ds_left])
        mbarrier.arrive(stages.empty.index(stage))

    # The last tile is the diagonal: every mask, and differences of c that are exact near 0.
    final = (count - 1) % STAGES
    k_t = k_s.index(0).reshape([ROWS, D])
    v_t = v_s.index(0).reshape([ROWS, D])
    q_t = stages.x.index(final).reshape([ROWS, D])
    g_t = stages.y.index(final).reshape([ROWS, D])
    mbarrier.wait(stages.full.index(final), ((count - 1) // STAGES) & 1)
    s = warpgroup_mma(k_t, q_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    j = column + gl.arange(0, ROWS, L.rows)
    i = (end - count) * ROWS + gl.arange(0, ROWS, L.columns)
    high_j, low_j = unpack(own_pairs.load(L.rows))
    high_i, low_i = unpack(numbers_in(row_pairs_s, gl.int64, ROWS).load(L.columns))
    level, unused = unpack(numbers_in(levels_s, gl.int64, ROWS).load(L.columns))
    scores, kept = diagonal_scores(s, scale, i, high_i, low_i, j, high_j, low_j, 0)
    kept = kept & gl.expand_dims((j < seqlen) & (j >= earliest), 1) & gl.expand_dims(i < seqlen, 0)
    p = gl.exp2(gl.where(kept, scores - gl.expand_dims(level, 0), float("-inf")))
    p_left = gl.convert_layout(p.to(stages.x.dtype), L.left)
    dv_acc = warpgroup_mma(p_left, g_t, dv_acc, is_async=True)
    dp = warpgroup_mma(v_t, g_t.permute([1, 0]), zero, use_acc=False, is_async=True)
    dp, dv_sum, p_left = warpgroup_mma_wait(0, [dp, dv_acc, p_left])
    unused, delta = unpack(numbers_in(levels_s, gl.int64, ROWS).load(L.columns))
    ds = p * (dp - gl.expand_dims(delta, 0))
    parts += gl.sum(gl.reshape(ds, [ROWS, ROWS // 8, 8]), 1)
    dk_sum = warpgroup_mma(gl.convert_layout(ds.to(stages.x.dtype), L.left), q_t, dk_acc)

    b = (bh // heads).to(gl.int64)
    h = (bh % heads).to(gl.int64)
    dk += b * dk_strides.batch + h * dk_strides.head + column.to(gl.int64) * dk_strides.token
    dv += b * dv_strides.batch + h * dv_strides.head + column.to(gl.int64) * dv_strides.token
    at = bh.to(gl.int64) * seqlen
    store_tile(dk, dk_sum * sm_scale, dk_strides.token, seqlen - column, ROWS, D)
    store_tile(dv, dv_sum, dv_strides.token, seqlen - column, ROWS, D)
    column_sum = gl.convert_layout(gl.sum(parts, 1), L.rows)
    gl.store(dc + at + j, -column_sum, mask=j < seqlen)


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
    packed,
    dk_strides,
    dv_strides,
    batch_heads,
    heads,
    head_group,
    seqlen,
    seqlen_k,
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
):
    bh, tile = share_of_work(batch_heads, gl.cdiv(seqlen_k, ROWS), head_group)
    column = tile * ROWS  # the first keys, which have the most queries, start first
    b = bh // heads
    h = bh % heads
    wide = bh.to(gl.int64)
    key_b, origin, first_key = find_keys(b, packed)
    if packed is not None and column < first_key:  # no query reads these keys, which k does not contain
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        dc += wide * seqlen_k + column
        gl.store(dc + gl.arange(0, ROWS, FLAT), gl.zeros([ROWS], gl.float32, FLAT))
        return
    # The last query tile to compute is on the diagonal, or the first one if all queries are after the keys.
    shift = (seqlen_k - seqlen) // ROWS  # a whole number of tiles
    tiles = gl.cdiv(seqlen, ROWS)
    final = gl.maximum(tile - shift, 0)

    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    g_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, D], q.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [1, 1, 1, ROWS, D], q.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [1, 1, 1, ROWS, D], q.layout)
    numbers_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 2 * ROWS], queries.layout)
    pairs_s = gl.allocate_shared_memory(gl.int32, [1, 2 * ROWS], queries.layout)
    row_pairs_s = gl.allocate_shared_memory(gl.int32, [1, 2 * ROWS], queries.layout)
    levels_s = gl.allocate_shared_memory(gl.int32, [1, 2 * ROWS], queries.layout)
    full, empty, own = make_barriers(STAGES, 1)
    stages = Stages(q_s, g_s, numbers_s, full, empty)
    mbarrier.expect(own, 4 * ROWS * D + 24 * ROWS)
    copy_tile(own_pairs, [bh, 2 * column], own, pairs_s)
    copy_tile(own_pairs, [bh, 2 * (final + shift) * ROWS], own, row_pairs_s)
    copy_tile(levels, [bh, 2 * final * ROWS], own, levels_s)
    place = column + origin
    copy_tile(k, [key_b, h // SHARED, place, 0], own, k_s.index(0))
    copy_tile(v, [key_b, h // SHARED, place, 0], own, v_s.index(0))

    WIDE: gl.constexpr = D > 64
    end = tiles
    earliest = 0
    if boundary is not None:
        boundary += wide * row_blocks
        rows = 0
        for chunk in range(0, row_blocks, COUNT):
            block = chunk + gl.arange(0, COUNT, gl.BlockedLayout([COUNT // 32], [32], [4], [0]))
            starts = gl.load(boundary + block, mask=block < row_blocks, other=2147483647)
            rows += gl.sum((starts <= column // BLOCK_K).to(gl.int32), 0)
        end = gl.minimum(tiles, rows * (BLOCK_Q // ROWS))
        # Off the diagonal, no query may see the keys; the last tile is then computed with all keys hidden.
        earliest = gl.where(end > final, 0, seqlen_k)
    if seq_start is not None:
        earliest = gl.maximum(earliest, gl.load(seq_start + b).to(gl.int32))
        end = gl.where(gl.minimum(column + ROWS, seqlen_k) <= earliest, final + 1, end)
    end = gl.maximum(end, final + 1)
    count = end - final
    source = Source(q, dout, queries, b, h, bh, end - 1, 0)
    for each in gl.static_range(STAGES):
        fetch(each, each < count, source, stages, None, ROWS, D, STAGES, STAGES, False)
    if not WIDE:
        dk = head_of(dk, b, h, dk_strides, False) + place.to(gl.int64) * dk_strides.token
        dv = head_of(dv, b, h, dv_strides, False) + place.to(gl.int64) * dv_strides.token
        dc += wide * seqlen_k
    elif packed is not None:
        dk += origin.to(gl.int64) * dk_strides.token
        dv += origin.to(gl.int64) * dv_strides.token
    gl.warp_specialize(
        [
            (
                _multiply_wide if WIDE else _multiply,
                (
                    stages,
                    k_s,
                    v_s,
                    pairs_s,
                    row_pairs_s,
                    levels_s,
                    own,
                    dk,
                    dv,
                    dc,
                    pairs + wide * padded,
                    dk_strides,
                    dv_strides,
                    bh,
                    heads,
                    end + shift,
                    count,
                    column,
                    earliest,
                    seqlen_k,
                    scale,
                    sm_scale,
                    ROWS,
                    D,
                    STAGES,
                ),
            ),
            (copy_the_rest, (count, source, stages, None, ROWS, D, STAGES, STAGES, False)),
        ],
        [1],
        [24],
    )
