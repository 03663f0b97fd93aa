"""A tile of queries and its keys: code that the forward and the query side of the backward share."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import find_keys, head_of, load_rows, stream_rows, window_start


@triton.jit
def open_query_tile(
    tensors,
    strides,
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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Loads queries ``row .. row + ROWS`` of one head and finds the key tiles that they see.

    Args:
        tensors, strides: of q, k, v and out. packed: see :func:`.dispatch.forward`.

    Returns:
        b, h: the batch row and the head. q_tile: the loaded queries. keys: the argument of
        :func:`stream_keys`. out: the output rows of the head. first: the absolute position of the first
        query.
        start, diagonal, end: tiles ``start .. diagonal`` end at or before ``first``, and the diagonal crosses
        the rest. earliest: the first key that is not padding. edge: the first key that no query's window
        excludes.
    """
    q, k, v, out = tensors
    q_strides, k_strides, v_strides, o_strides = strides
    b = bh // heads
    h = bh % heads
    kv_h = h // SHARED  # the head of keys and values that SHARED query heads read
    q = head_of(q, b, h, q_strides, False)
    key_b, origin, _ = find_keys(b, packed)
    k = head_of(k, key_b, kv_h, k_strides, DESCRIPTORS)
    v = head_of(v, key_b, kv_h, v_strides, DESCRIPTORS)
    out = head_of(out, b, h, o_strides, False)
    keys = (k, v, key_b, kv_h, k_strides.token, v_strides.token, origin, seqlen_k)
    first = row + seqlen_k - seqlen_q
    start = 0
    earliest = 0
    edge = 0
    if boundary is not None:
        boundary += bh.to(tl.int64) * row_blocks + row // BLOCK_Q
        start = tl.load(boundary) * (BLOCK_K // COLUMNS)
    if seq_start is not None:
        earliest = tl.minimum(tl.load(seq_start + b), seqlen_k).to(tl.int32)
        start = tl.maximum(start, earliest // COLUMNS)
    if window is not None:
        start = tl.maximum(start, window_start(first, window) // COLUMNS)
        edge = window_start(tl.minimum(first + ROWS, seqlen_k) - 1, window)
    diagonal = tl.maximum((first + 1) // COLUMNS, start)
    end = tl.cdiv(tl.minimum(first + ROWS, seqlen_k), COLUMNS)
    q_tile = load_rows(q, row, q_strides.token, seqlen_q, ROWS, D, BLOCK_D, True)
    return b, h, q_tile, keys, out, first, start, diagonal, end, earliest, edge


@triton.jit
def stream_keys(
    keys,
    column,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Keys and values ``column .. column + COLUMNS`` of one head.

    Args:
        keys: (k, v, batch, head, stride of k, stride of v, row of key 0, seqlen_k).
    """
    k, v, b, h, k_t, v_t, origin, seqlen_k = keys
    row, end = column + origin, seqlen_k + origin
    k_tile = stream_rows(k, b, h, row, k_t, end, COLUMNS, D, BLOCK_D, MASKED, DESCRIPTORS)
    v_tile = stream_rows(v, b, h, row, v_t, end, COLUMNS, D, BLOCK_D, MASKED, DESCRIPTORS)
    return k_tile, v_tile


@triton.jit
def exact_scores(s, position, high_i, low_i, j, high_j, low_j, seq_start, earliest, window):
    """Scores with the exact difference of c at each entry, and the mask of visible entries."""
    s += low_i[:, None] - low_j[None, :]
    s += high_i[:, None] - high_j[None, :]
    kept = position[:, None] >= j[None, :]
    if seq_start is not None:
        kept = kept & (j >= earliest)[None, :]
    if window is not None:
        kept = kept & (j[None, :] >= window_start(position, window)[:, None])
    return s, kept
