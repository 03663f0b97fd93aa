"""The query side of the backward: dQ, and what the key side needs; see ``backward``."""

from __future__ import annotations

import triton
import triton.language as tl

from .differences import load_pair, pack, unpack
from .query_tile import exact_scores, key_tiles, stream_keys
from .tiles import COUNTS, head_of, load_rows, product, share_of_work, store_rows, window_start


@triton.jit
def _query_side_masked(
    acc,
    parts,
    q_tile,
    g_tile,
    keys,
    pairs,
    position,
    high_i,
    low_i,
    level_i,
    delta_i,
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
    """Adds key tiles ``begin .. end`` with every mask and exact differences of c."""
    ROWS: tl.constexpr = q_tile.shape[0]
    BLOCK_D: tl.constexpr = q_tile.shape[1]
    seqlen_k = keys[-1]
    for n in tl.range(begin, end):
        j = n * COLUMNS + tl.arange(0, COLUMNS)
        k_tile, v_tile = stream_keys(keys, n * COLUMNS, COLUMNS, D, BLOCK_D, True, DESCRIPTORS)
        high_j, low_j = load_pair(pairs, j, j < seqlen_k)
        s = product(q_tile, tl.trans(k_tile), None) * scale
        dp = product(g_tile, tl.trans(v_tile), None)
        s, kept = exact_scores(s, position, high_i, low_i, j, high_j, low_j, seq_start, earliest, window)
        p = tl.math.exp2(tl.where(kept, s - level_i[:, None], float("-inf")))
        ds = p * (dp - delta_i[:, None])
        parts += tl.sum(tl.reshape(ds, [ROWS, COLUMNS // 8, 8]), 1)
        acc = product(ds.to(k_tile.dtype), k_tile, acc)
    return acc, parts


@triton.jit(do_not_specialize=COUNTS)
def query_side_kernel(
    q,
    k,
    v,
    out,
    dout,
    lse,
    dq,
    levels,
    queries,
    pairs,
    tail,
    boundary,
    seq_start,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    g_b,
    g_h,
    g_t,
    dq_b,
    dq_h,
    dq_t,
    batch_heads,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    row_tiles,
    row_blocks,
    key_rows,
    window,
    scale,
    sm_scale,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    bh, tile = share_of_work(batch_heads, row_tiles, group)
    row = (row_tiles - 1 - tile) * ROWS  # the last rows, which have the most keys, start first
    b = bh // heads
    h = bh % heads
    kv_h = h // SHARED
    q = head_of(q, b, h, q_b, q_h, False)
    k = head_of(k, b, kv_h, k_b, k_h, DESCRIPTORS)
    v = head_of(v, b, kv_h, v_b, v_h, DESCRIPTORS)
    out = head_of(out, b, h, o_b, o_h, False)
    dout = head_of(dout, b, h, g_b, g_h, False)
    dq = head_of(dq, b, h, dq_b, dq_h, False)
    bh = bh.to(tl.int64)
    pairs += bh * seqlen_k
    tail += bh * seqlen_k
    keys = (k, v, b, kv_h, k_t, v_t, seqlen_k)

    r = tl.arange(0, ROWS)
    i = row + r
    first = row + seqlen_k - seqlen_q  # absolute position of the tile's first query
    position = first + r
    inside = i < seqlen_q
    if boundary is not None:
        boundary = boundary + bh * row_blocks + row // BLOCK_Q
    start, diagonal, end, earliest, edge = key_tiles(
        first, boundary, seq_start, b, seqlen_k, window, ROWS, COLUMNS, BLOCK_K
    )

    q_tile = load_rows(q, row, q_t, seqlen_q, ROWS, D, BLOCK_D, True)
    g_tile = load_rows(dout, row, g_t, seqlen_q, ROWS, D, BLOCK_D, True)
    o_tile = load_rows(out, row, o_t, seqlen_q, ROWS, D, BLOCK_D, True)
    delta_i = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
    level_i = tl.load(lse + bh * seqlen_q + i, mask=inside, other=float("inf"))
    # A row with no key has lse = -inf; its weights are 0, as those of a row with lse = +inf.
    level_i = tl.where(level_i == float("-inf"), float("inf"), level_i)
    high_i, low_i = load_pair(pairs, position, inside)
    high_base, low_base = unpack(tl.load(pairs + first))
    shifted_i = level_i - ((high_i - high_base) + (low_i - low_base))
    parts = tl.zeros([ROWS, 8], dtype=tl.float32)  # of the row sums; a thread's own, no exchange
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)

    # What a tile needs of c is loaded one tile ahead; `tail` has room for the one past the end.
    bias = tl.load(tail + start * COLUMNS + tl.arange(0, COLUMNS))
    pair_end = tl.load(pairs + tl.minimum(start * COLUMNS + (COLUMNS - 1), seqlen_k - 1))
    for n in tl.range(start, diagonal):
        column = n * COLUMNS
        k_tile, v_tile = stream_keys(keys, column, COLUMNS, D, BLOCK_D, False, DESCRIPTORS)
        high_end, low_end = unpack(pair_end)
        gap = (high_base - high_end) + (low_base - low_end)
        pair_end = tl.load(pairs + tl.minimum(column + (2 * COLUMNS - 1), seqlen_k - 1))
        s = product(q_tile, tl.trans(k_tile), None)
        dp = product(g_tile, tl.trans(v_tile), None)
        if window is not None and column < edge:
            j = column + tl.arange(0, COLUMNS)
            s = tl.where(j[None, :] >= window_start(position, window)[:, None], s, float("-inf"))
        p = tl.math.exp2(s * scale + bias[None, :] - (shifted_i - gap)[:, None])
        bias = tl.load(tail + (column + COLUMNS) + tl.arange(0, COLUMNS))
        ds = p * (dp - delta_i[:, None])
        parts += tl.sum(tl.reshape(ds, [ROWS, COLUMNS // 8, 8]), 1)
        acc = product(ds.to(k_tile.dtype), k_tile, acc)

    acc, parts = _query_side_masked(
        acc,
        parts,
        q_tile,
        g_tile,
        keys,
        pairs,
        position,
        high_i,
        low_i,
        level_i,
        delta_i,
        seq_start,
        earliest,
        window,
        scale,
        diagonal,
        end,
        COLUMNS,
        D,
        DESCRIPTORS,
    )

    store_rows(dq, acc * sm_scale, row, dq_t, seqlen_q, ROWS, D, BLOCK_D)
    # For the key side, in pairs: lse and delta; c_i - c[first position of i's tile there] - lse,
    # and delta.
    delta_i += tl.sum(parts, 1)
    high_first, low_first = load_pair(pairs, (i // key_rows) * key_rows + (seqlen_k - seqlen_q), inside)
    to_add = ((high_i - high_first) + (low_i - low_first)) - level_i
    tl.store(levels + bh * seqlen_q + i, pack(level_i, delta_i), mask=inside)
    tl.store(queries + bh * seqlen_q + i, pack(to_add, delta_i), mask=inside)
