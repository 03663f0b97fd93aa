"""The forward kernel: one program per query tile, over its kept key tiles (Equations 1 and 3)."""

from __future__ import annotations

import triton
import triton.language as tl

from .differences import load_pair, unpack
from .launch import launch
from .query_tile import exact_scores, open_query_tile, stream_keys
from .tiles import (
    COUNTS,
    HEAD_GROUP,
    LOG2E,
    Tile,
    can_stream,
    describe_stream,
    padded_head_dim,
    product,
    room_for,
    share_of_work,
    store_rows,
    strides_of,
    window_start,
)


@triton.jit
def _masked_tiles(
    q_tile,
    keys,
    pairs,
    first,
    seq_start,
    earliest,
    window,
    scale,
    begin,
    end,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Accumulates key tiles ``begin .. end`` with all masks, exact differences of c and the online softmax:
    m_i is the running maximum of each row, in units of log 2, and l_i its running sum."""
    ROWS: tl.constexpr = q_tile.shape[0]
    BLOCK_D: tl.constexpr = q_tile.shape[1]
    seqlen_k = keys[-1]
    position = first + tl.arange(0, ROWS)
    high_i, low_i = load_pair(pairs, position, position < seqlen_k)
    m_i = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for n in tl.range(begin, end):
        j = n * COLUMNS + tl.arange(0, COLUMNS)
        k_tile, v_tile = stream_keys(keys, n * COLUMNS, COLUMNS, D, BLOCK_D, True, DESCRIPTORS)
        high_j, low_j = load_pair(pairs, j, j < seqlen_k)
        s = product(q_tile, tl.trans(k_tile), None) * scale
        s, kept = exact_scores(s, position, high_i, low_i, j, high_j, low_j, seq_start, earliest, window)
        s = tl.where(kept, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # A row without keys so far: any finite number works, because every exponent is -inf.
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - m_finite[:, None])
        alpha = tl.math.exp2(m_i - m_finite)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = product(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


# In float16, up to this many key tiles before the diagonal, all tiles use the online softmax.
_FEW = tl.constexpr(3)


@triton.jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    pairs,
    tail,
    boundary,
    seq_start,
    packed,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    batch_heads,
    heads,
    head_group,
    seqlen_q,
    seqlen_k,
    padded,
    row_tiles,
    row_blocks,
    window,
    scale,
    recompute_tiles,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    ROOM: tl.constexpr,
):
    bh, tile = share_of_work(batch_heads, row_tiles, head_group)
    tile = row_tiles - 1 - tile  # the last rows, which have the most keys, start first
    if recompute_tiles is not None:  # another kernel has computed all but the marked tiles
        recompute_tiles += (bh.to(tl.int64) * row_tiles + tile) * 2
        if tl.load(recompute_tiles) + tl.load(recompute_tiles + 1) == 0:
            return
    row = tile * ROWS
    b, h, q_tile, keys, out, first, start, diagonal, end, earliest, edge = open_query_tile(
        (q, k, v, out),
        (q_strides, k_strides, v_strides, o_strides),
        boundary,
        seq_start,
        packed,
        bh,
        heads,
        row,
        seqlen_q,
        seqlen_k,
        row_blocks,
        window,
        BLOCK_Q,
        BLOCK_K,
        ROWS,
        COLUMNS,
        D,
        BLOCK_D,
        SHARED,
        DESCRIPTORS,
    )
    bh = bh.to(tl.int64)
    pairs += bh * padded
    tail += bh * padded
    position = first + tl.arange(0, ROWS)
    inside = position < seqlen_k
    # The tiles on the diagonal come first. The key at the query's own position has no decay, so these tiles
    # show how large the scores of the row are. In float16, the tile before them follows, or all if few.
    near = diagonal
    if q_tile.dtype == tl.float16:
        near -= tl.where(diagonal - start > _FEW, 1, diagonal - start)
    acc, l_i, m_i = _masked_tiles(
        q_tile, keys, pairs, first, seq_start, earliest, window, scale, near, end, COLUMNS, D, DESCRIPTORS
    )
    acc *= 2.0**-ROOM
    l_i *= 2.0**-ROOM

    # The decayed rest uses this fixed level, without a running maximum or rescaling. Scores and level both
    # omit c_i - c[first], which is constant within a row.
    high_base, low_base = unpack(tl.load(pairs + first))
    high_i, low_i = load_pair(pairs, position, inside)
    level = m_i - ((high_i - high_base) + (low_i - low_base)) + ROOM
    parts = tl.zeros([ROWS, 8], dtype=tl.float32)  # partial sums of the rows, each in one thread
    # The terms of c are prefetched one tile ahead; `tail` is padded by one tile.
    bias = tl.load(tail + start * COLUMNS + tl.arange(0, COLUMNS))
    pair_end = tl.load(pairs + tl.minimum(start * COLUMNS + (COLUMNS - 1), seqlen_k - 1))
    for n in tl.range(start, near):
        column = n * COLUMNS
        k_tile, v_tile = stream_keys(keys, column, COLUMNS, D, BLOCK_D, False, DESCRIPTORS)
        high_end, low_end = unpack(pair_end)
        gap = (high_base - high_end) + (low_base - low_end)
        pair_end = tl.load(pairs + tl.minimum(column + (2 * COLUMNS - 1), seqlen_k - 1))
        s = product(q_tile, tl.trans(k_tile), None)
        if window is not None and column < edge:
            j = column + tl.arange(0, COLUMNS)
            s = tl.where(j[None, :] >= window_start(position, window)[:, None], s, float("-inf"))
        p = tl.math.exp2(s * scale + bias[None, :] - (level - gap)[:, None])
        bias = tl.load(tail + (column + COLUMNS) + tl.arange(0, COLUMNS))
        parts += tl.sum(tl.reshape(p, [ROWS, COLUMNS // 8, 8]), 1)
        acc = product(p.to(v_tile.dtype), v_tile, acc)
    l_i += tl.sum(parts, 1)
    # Rarely, a later score exceeds the level so far that its weight overflows. The row is then recomputed.
    # (Below this limit, bfloat16 and float32 lose no precision; float16 overflows at 65504.)
    LIMIT: tl.constexpr = 32768.0 if q_tile.dtype == tl.float16 else 1e18
    if tl.max(tl.where(l_i < LIMIT, 0, 1), 0) > 0:
        acc, l_i, m_i = _masked_tiles(
            q_tile,
            keys,
            pairs,
            first,
            seq_start,
            earliest,
            window,
            scale,
            start,
            end,
            COLUMNS,
            D,
            DESCRIPTORS,
        )
        acc *= 2.0**-ROOM
        l_i *= 2.0**-ROOM

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    store_rows(out, acc, row, o_strides.token, seqlen_q, ROWS, D, BLOCK_D)
    i = row + tl.arange(0, ROWS)
    tl.store(lse + bh * seqlen_q + i, m_i + tl.math.log2(l_i * 2.0**ROOM), mask=inside)


def launch_forward(
    q,
    k,
    v,
    out,
    lse,
    terms,
    boundary,
    seq_start,
    sm_scale,
    block_q,
    block_k,
    tile: Tile,
    window_size,
    recompute_tiles,
    packed,
) -> None:
    """Launches the forward, which writes to the given tensors; only to ``recompute_tiles`` if given."""
    batch, heads, seqlen_q, head_dim = q.shape
    row_tiles = triton.cdiv(seqlen_q, tile.rows)
    descriptors = can_stream(k, v)
    launch(
        _forward_kernel,
        (row_tiles * batch * heads,),
        q,
        describe_stream(k, tile.columns, descriptors),
        describe_stream(v, tile.columns, descriptors),
        out,
        lse,
        *terms,
        boundary,
        seq_start,
        packed,
        *map(strides_of, (q, k, v, out)),
        batch * heads,
        heads,
        HEAD_GROUP,
        seqlen_q,
        k.shape[2] if packed is None else terms.pairs.shape[2],
        terms.pairs.shape[2],
        row_tiles,
        triton.cdiv(seqlen_q, block_q),
        window_size,
        sm_scale * LOG2E.value,
        recompute_tiles,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        D=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        SHARED=heads // k.shape[1],
        DESCRIPTORS=descriptors,
        ROOM=room_for(q, sm_scale),
        **tile.options(q.device),
    )
