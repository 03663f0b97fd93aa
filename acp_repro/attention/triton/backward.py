"""The backward kernels: a query side (dQ, delta) and a key side (dK, dV, column sums of dS).

    P = exp(S - log sum exp S),  dP = dO V^T,  dS = P * (dP - delta),  delta_i = sum_d dO_id O_id
    dQ = sm_scale dS K,  dK = sm_scale dS^T Q,  dV = P^T dO,  dc_j = -sum_i dS_ij

Each side recomputes the scores. This costs two more matrix products than one fused kernel, but every sum has
a fixed order, so the gradients are deterministic: equal inputs give bitwise identical results.

In exact arithmetic the row sums of dS are 0. In bfloat16, delta is computed from a rounded output, and the
sum of a row equals the error of delta, because the weights of a row sum to 1. The gradient of a gate
accumulates thousands of these residues. The query side therefore adds each row's sum to the delta of the key
side, over the same entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .differences import load_pair, pack, unpack
from .gates import decay_terms
from .launch import launch
from .query_tile import exact_scores, open_query_tile, stream_keys
from .tiles import (
    COUNTS,
    HEAD_GROUP,
    LOG2E,
    Tiles,
    can_stream,
    describe_stream,
    find_keys,
    head_of,
    load_rows,
    padded_head_dim,
    product,
    share_of_work,
    store_rows,
    stream_rows,
    strides_of,
    window_end,
    window_start,
)


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
    """Accumulates key tiles ``begin .. end`` with all masks and exact differences of c."""
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
def _query_side_kernel(
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
    packed,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    g_strides,
    dq_strides,
    batch_heads,
    heads,
    head_group,
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
    """The query side: dQ, and the inputs of the key side."""
    bh, tile = share_of_work(batch_heads, row_tiles, head_group)
    row = (row_tiles - 1 - tile) * ROWS  # the last rows, which have the most keys, start first
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
    dout = head_of(dout, b, h, g_strides, False)
    dq = head_of(dq, b, h, dq_strides, False)
    bh = bh.to(tl.int64)
    pairs += bh * seqlen_k
    tail += bh * seqlen_k
    i = row + tl.arange(0, ROWS)
    position = first + tl.arange(0, ROWS)
    inside = i < seqlen_q
    g_tile = load_rows(dout, row, g_strides.token, seqlen_q, ROWS, D, BLOCK_D, True)
    o_tile = load_rows(out, row, o_strides.token, seqlen_q, ROWS, D, BLOCK_D, True)
    delta_i = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
    level_i = tl.load(lse + bh * seqlen_q + i, mask=inside, other=float("inf"))
    # A row without keys has lse = -inf. With lse = +inf, its weights are 0.
    level_i = tl.where(level_i == float("-inf"), float("inf"), level_i)
    high_i, low_i = load_pair(pairs, position, inside)
    high_base, low_base = unpack(tl.load(pairs + first))
    shifted_i = level_i - ((high_i - high_base) + (low_i - low_base))
    parts = tl.zeros([ROWS, 8], dtype=tl.float32)  # partial row sums, each in one thread
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)

    # The terms of c are prefetched one tile ahead; `tail` is padded by one tile.
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

    store_rows(dq, acc * sm_scale, row, dq_strides.token, seqlen_q, ROWS, D, BLOCK_D)
    # Two pairs for the key side: (lse, delta) and (c_i - c[first position of i's tile there] - lse, delta).
    delta_i += tl.sum(parts, 1)
    high_first, low_first = load_pair(pairs, (i // key_rows) * key_rows + (seqlen_k - seqlen_q), inside)
    to_add = ((high_i - high_first) + (low_i - low_first)) - level_i
    tl.store(levels + bh * seqlen_q + i, pack(level_i, delta_i), mask=inside)
    tl.store(queries + bh * seqlen_q + i, pack(to_add, delta_i), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _key_side_kernel(
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
    packed,
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    dk_strides,
    dv_strides,
    batch_heads,
    heads,
    head_group,
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
    """The key side: dK, dV and the gradient of c."""
    # All tiles are transposed, (keys, queries). Each operand of a product is then a loaded tile or a score
    # tile as computed, and no computed tile has to be transposed.
    column_tiles = tl.cdiv(seqlen_k, COLUMNS)
    bh, tile = share_of_work(batch_heads, column_tiles, head_group)
    column = tile * COLUMNS  # the first keys, which have the most queries, start first
    b = bh // heads
    h = bh % heads
    q = head_of(q, b, h, q_strides, DESCRIPTORS)
    key_b, origin, first_key = find_keys(b, packed)
    k = head_of(k, key_b, h // SHARED, k_strides, False)
    v = head_of(v, key_b, h // SHARED, v_strides, False)
    dout = head_of(dout, b, h, g_strides, DESCRIPTORS)
    dk = head_of(dk, key_b, h, dk_strides, False)
    dv = head_of(dv, key_b, h, dv_strides, False)
    bh = bh.to(tl.int64)
    dc += bh * seqlen_k
    pairs += bh * seqlen_k
    levels += bh * seqlen_q
    queries += bh * seqlen_q

    j = column + tl.arange(0, COLUMNS)
    if packed is not None and column < first_key:  # no query reads these keys, which k does not contain
        tl.store(dc + j, tl.zeros([COLUMNS], dtype=tl.float32), mask=j < seqlen_k)
        return
    shift = seqlen_k - seqlen_q
    valid = j < seqlen_k
    last = tl.minimum(column + COLUMNS, seqlen_k) - 1
    begin = tl.maximum(column - shift, 0) // ROWS
    # Queries of tiles from `below` on see all of these keys. Earlier tiles are on the diagonal, which is
    # never pruned.
    below = tl.maximum(tl.cdiv(tl.maximum(last - shift, 0), ROWS), begin)
    below = tl.minimum(below, tl.cdiv(seqlen_q, ROWS))
    if seq_start is not None:
        earliest = tl.load(seq_start + b)
        valid = valid & (j >= earliest)
        below = tl.where(last < earliest, begin, below)
    if boundary is not None:
        # Loaded before the diagonal tiles and used after them, which hides the latency.
        boundary += bh * row_blocks
        block = tl.arange(0, COUNT)
        starts = tl.load(boundary + block, mask=block < row_blocks, other=2147483647)

    place, stop = column + origin, seqlen_k + origin
    k_tile = load_rows(k, place, k_strides.token, stop, COLUMNS, D, BLOCK_D, True)
    v_tile = load_rows(v, place, v_strides.token, stop, COLUMNS, D, BLOCK_D, True)
    high_base, low_base = unpack(tl.load(pairs + last))
    high_j, low_j = load_pair(pairs, j, j < seqlen_k)
    rise = tl.where(valid, (high_base - high_j) + (low_base - low_j), float("-inf"))
    parts = tl.zeros([COLUMNS, 8], dtype=tl.float32)  # partial column sums
    dk_acc = tl.zeros([COLUMNS, BLOCK_D], dtype=tl.float32)
    dv_acc = tl.zeros([COLUMNS, BLOCK_D], dtype=tl.float32)

    for m in tl.range(begin, below):
        row = m * ROWS
        i = row + tl.arange(0, ROWS)
        inside = i < seqlen_q
        q_tile = stream_rows(q, b, h, row, q_strides.token, seqlen_q, ROWS, D, BLOCK_D, True, DESCRIPTORS)
        g_tile = stream_rows(dout, b, h, row, g_strides.token, seqlen_q, ROWS, D, BLOCK_D, True, DESCRIPTORS)
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
        # The boundary is non-decreasing, so the number of query blocks that keep this key block is the end
        # of their range.
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
        edge = window_end(column, window) - shift  # earlier rows see all of these keys
    pair_first = tl.load(pairs + shift + tl.minimum(below * ROWS, seqlen_q - 1))
    for m in tl.range(below, end):
        row = m * ROWS
        i = row + tl.arange(0, ROWS)
        q_tile = stream_rows(q, b, h, row, q_strides.token, seqlen_q, ROWS, D, BLOCK_D, RAGGED, DESCRIPTORS)
        g_tile = stream_rows(
            dout, b, h, row, g_strides.token, seqlen_q, ROWS, D, BLOCK_D, RAGGED, DESCRIPTORS
        )
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

    store_rows(dk, dk_acc * sm_scale, place, dk_strides.token, stop, COLUMNS, D, BLOCK_D)
    store_rows(dv, dv_acc, place, dv_strides.token, stop, COLUMNS, D, BLOCK_D)
    tl.store(dc + j, -tl.sum(parts, 1), mask=j < seqlen_k)


def launch_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    c,
    boundary,
    seq_start,
    sm_scale,
    block_q,
    block_k,
    dq,
    dk,
    dv,
    dc,
    tiles: Tiles,
    window_size: int | None,
    packed,
) -> None:
    """Launches both sides, which write to the given tensors; dk and dv have as many heads as q."""
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = c.shape[2]
    _, query, key = tiles
    descriptors = can_stream(q, k, v, dout)
    common = {
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "D": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "SHARED": heads // k.shape[1],
        "DESCRIPTORS": descriptors,
    }
    row_blocks = triton.cdiv(seqlen_q, block_q)
    row_tiles = triton.cdiv(seqlen_q, query.rows)
    scale = sm_scale * LOG2E.value
    levels, queries = torch.empty((2, *lse.shape), dtype=torch.int64, device=q.device)
    terms = decay_terms(c, seq_start, query.columns)
    launch(
        _query_side_kernel,
        (row_tiles * batch * heads,),
        q,
        describe_stream(k, query.columns, descriptors),
        describe_stream(v, query.columns, descriptors),
        out,
        dout,
        lse,
        dq,
        levels,
        queries,
        *terms,
        boundary,
        seq_start,
        packed,
        *map(strides_of, (q, k, v, out, dout, dq)),
        batch * heads,
        heads,
        HEAD_GROUP,
        seqlen_q,
        seqlen_k,
        row_tiles,
        row_blocks,
        key.rows,
        window_size,
        scale,
        sm_scale,
        ROWS=query.rows,
        COLUMNS=query.columns,
        **common,
        **query.options(q.device),
    )
    launch(
        _key_side_kernel,
        (triton.cdiv(seqlen_k, key.columns) * batch * heads,),
        describe_stream(q, key.rows, descriptors),
        k,
        v,
        describe_stream(dout, key.rows, descriptors),
        dk,
        dv,
        dc,
        levels,
        queries,
        terms.pairs,
        boundary,
        seq_start,
        packed,
        *map(strides_of, (q, k, v, dout, dk, dv)),
        batch * heads,
        heads,
        HEAD_GROUP,
        seqlen_q,
        seqlen_k,
        row_blocks,
        window_size,
        scale,
        sm_scale,
        ROWS=key.rows,
        COLUMNS=key.columns,
        RAGGED=seqlen_q % key.rows != 0,
        COUNT=256,
        **common,
        **key.options(q.device),
    )
