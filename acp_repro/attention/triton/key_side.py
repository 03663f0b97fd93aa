"""The key side of the backward: dK, dV and the gradient of c; see ``backward``."""

from __future__ import annotations

import triton
import triton.language as tl

from .differences import load_pair, unpack
from .tiles import COUNTS, head_of, load_rows, product, share_of_work, store_rows, stream_rows, window_end


@triton.jit(do_not_specialize=COUNTS)
def key_side_kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
    dc,
    levels,
    queries,
    pairs,
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
    g_b,
    g_h,
    g_t,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    batch_heads,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    row_blocks,
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
    RAGGED: tl.constexpr,
    COUNT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    # Everything here is transposed, (keys, queries): an operand of a product is then a loaded tile
    # or a score tile as it was computed, never the transpose of a computed one.
    column_tiles = tl.cdiv(seqlen_k, COLUMNS)
    bh, tile = share_of_work(batch_heads, column_tiles, group)
    column = tile * COLUMNS  # the first keys, which have the most queries, start first
    b = bh // heads
    h = bh % heads
    q = head_of(q, b, h, q_b, q_h, DESCRIPTORS)
    k = head_of(k, b, h // SHARED, k_b, k_h, False)
    v = head_of(v, b, h // SHARED, v_b, v_h, False)
    dout = head_of(dout, b, h, g_b, g_h, DESCRIPTORS)
    dk = head_of(dk, b, h, dk_b, dk_h, False)
    dv = head_of(dv, b, h, dv_b, dv_h, False)
    bh = bh.to(tl.int64)
    pairs += bh * seqlen_k
    levels += bh * seqlen_q
    queries += bh * seqlen_q

    j = column + tl.arange(0, COLUMNS)
    shift = seqlen_k - seqlen_q
    valid = j < seqlen_k
    last = tl.minimum(column + COLUMNS, seqlen_k) - 1
    begin = tl.maximum(column - shift, 0) // ROWS
    # Query tiles from `below` on see all of these keys. Those before it are on the diagonal and
    # always kept.
    below = tl.maximum(tl.cdiv(tl.maximum(last - shift, 0), ROWS), begin)
    below = tl.minimum(below, tl.cdiv(seqlen_q, ROWS))
    if seq_start is not None:
        earliest = tl.load(seq_start + b)
        valid = valid & (j >= earliest)
        below = tl.where(last < earliest, begin, below)
    if boundary is not None:
        # Loaded here and used after the diagonal, which hides the wait.
        boundary += bh * row_blocks
        block = tl.arange(0, COUNT)
        starts = tl.load(boundary + block, mask=block < row_blocks, other=2147483647)

    k_tile = load_rows(k, column, k_t, seqlen_k, COLUMNS, D, BLOCK_D, True)
    v_tile = load_rows(v, column, v_t, seqlen_k, COLUMNS, D, BLOCK_D, True)
    high_base, low_base = unpack(tl.load(pairs + last))
    high_j, low_j = load_pair(pairs, j, j < seqlen_k)
    rise = tl.where(valid, (high_base - high_j) + (low_base - low_j), float("-inf"))
    parts = tl.zeros([COLUMNS, 8], dtype=tl.float32)  # of the column sums
    dk_acc = tl.zeros([COLUMNS, BLOCK_D], dtype=tl.float32)
    dv_acc = tl.zeros([COLUMNS, BLOCK_D], dtype=tl.float32)

    for m in tl.range(begin, below):
        row = m * ROWS
        i = row + tl.arange(0, ROWS)
        inside = i < seqlen_q
        q_tile = stream_rows(q, b, h, row, q_t, seqlen_q, ROWS, D, BLOCK_D, True, DESCRIPTORS)
        g_tile = stream_rows(dout, b, h, row, g_t, seqlen_q, ROWS, D, BLOCK_D, True, DESCRIPTORS)
        high_i, low_i = load_pair(pairs, shift + i, inside)
        level_i, delta_i = load_pair(levels, i, inside)
        s = product(k_tile, tl.trans(q_tile), None) * scale
        dp = product(v_tile, tl.trans(g_tile), None)
        s += low_i[None, :] - low_j[:, None]
        s += high_i[None, :] - high_j[:, None]
        kept = (tl.where(inside, shift + i, -1)[None, :] >= j[:, None]) & valid[:, None]
        if window is not None:
            kept = kept & ((shift + i)[None, :] <= window_end(j, window)[:, None])
        p = tl.math.exp2(tl.where(kept, s - level_i[None, :], float("-inf")))
        dv_acc = product(p.to(g_tile.dtype), g_tile, dv_acc)
        ds = p * (dp - delta_i[None, :])
        parts += tl.sum(tl.reshape(ds, [COLUMNS, ROWS // 8, 8]), 1)
        dk_acc = product(ds.to(q_tile.dtype), q_tile, dk_acc)

    end = tl.cdiv(seqlen_q, ROWS)
    if boundary is not None:
        # The boundary never falls from row to row, so counting the rows of blocks that keep this
        # key block gives the end of the last one.
        count = tl.sum((starts <= column // BLOCK_K).to(tl.int32), 0)
        for chunk in range(COUNT, row_blocks, COUNT):
            block = chunk + tl.arange(0, COUNT)
            starts = tl.load(boundary + block, mask=block < row_blocks, other=2147483647)
            count += tl.sum((starts <= column // BLOCK_K).to(tl.int32), 0)
        end = tl.minimum(end, count * (BLOCK_Q // ROWS))
    if seq_start is not None:
        end = tl.where(last < earliest, 0, end)
    if window is not None:
        end = tl.minimum(end, tl.maximum(window_end(last, window) - shift, -1) // ROWS + 1)
        edge = window_end(column, window) - shift  # rows up to it see all of these keys
    pair_first = tl.load(pairs + shift + tl.minimum(below * ROWS, seqlen_q - 1))
    for m in tl.range(below, end):
        row = m * ROWS
        i = row + tl.arange(0, ROWS)
        q_tile = stream_rows(q, b, h, row, q_t, seqlen_q, ROWS, D, BLOCK_D, RAGGED, DESCRIPTORS)
        g_tile = stream_rows(dout, b, h, row, g_t, seqlen_q, ROWS, D, BLOCK_D, RAGGED, DESCRIPTORS)
        high_first, low_first = unpack(pair_first)
        gap = (high_first - high_base) + (low_first - low_base)
        pair_first = tl.load(pairs + shift + tl.minimum(row + ROWS, seqlen_q - 1))
        if RAGGED:
            shifted_i, delta_i = load_pair(queries, i, i < seqlen_q)
            shifted_i = tl.where(i < seqlen_q, shifted_i, float("-inf"))
        else:
            shifted_i, delta_i = unpack(tl.load(queries + i))
        s = product(k_tile, tl.trans(q_tile), None)
        dp = product(v_tile, tl.trans(g_tile), None)
        if window is not None and row + (ROWS - 1) > edge:
            s = tl.where((shift + i)[None, :] <= window_end(j, window)[:, None], s, float("-inf"))
        p = tl.math.exp2(s * scale + shifted_i[None, :] + (rise + gap)[:, None])
        dv_acc = product(p.to(g_tile.dtype), g_tile, dv_acc)
        ds = p * (dp - delta_i[None, :])
        parts += tl.sum(tl.reshape(ds, [COLUMNS, ROWS // 8, 8]), 1)
        dk_acc = product(ds.to(q_tile.dtype), q_tile, dk_acc)

    store_rows(dk, dk_acc * sm_scale, column, dk_t, seqlen_k, COLUMNS, D, BLOCK_D)
    store_rows(dv, dv_acc, column, dv_t, seqlen_k, COLUMNS, D, BLOCK_D)
    tl.store(dc + bh * seqlen_k + j, -tl.sum(parts, 1), mask=j < seqlen_k)
