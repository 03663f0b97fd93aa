"""A tile of queries and its keys: what the forward and the query side of the backward share."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import stream_rows, window_start


@triton.jit
def key_tiles(
    first,
    boundary,
    seq_start,
    b,
    seqlen_k,
    window,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The key tiles that the queries from position ``first`` on see.

    Returns:
        start, diagonal, end: tiles ``start .. diagonal`` end at or before ``first``, the rest are crossed by
        the diagonal. earliest: the first key that is no padding. edge: from it on a window hides no key.
    """
    start = 0
    earliest = 0
    edge = 0
    if boundary is not None:
        start = tl.load(boundary) * (BLOCK_K // COLUMNS)
    if seq_start is not None:
        earliest = tl.minimum(tl.load(seq_start + b), seqlen_k).to(tl.int32)
        start = tl.maximum(start, earliest // COLUMNS)
    if window is not None:
        start = tl.maximum(start, window_start(first, window) // COLUMNS)
        edge = window_start(tl.minimum(first + ROWS, seqlen_k) - 1, window)
    diagonal = tl.maximum((first + 1) // COLUMNS, start)
    end = tl.cdiv(tl.minimum(first + ROWS, seqlen_k), COLUMNS)
    return start, diagonal, end, earliest, edge


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
        keys: (k, v, batch, head, stride of k, stride of v, seqlen_k).
    """
    k, v, b, h, k_t, v_t, seqlen_k = keys
    k_tile = stream_rows(k, b, h, column, k_t, seqlen_k, COLUMNS, D, BLOCK_D, MASKED, DESCRIPTORS)
    v_tile = stream_rows(v, b, h, column, v_t, seqlen_k, COLUMNS, D, BLOCK_D, MASKED, DESCRIPTORS)
    return k_tile, v_tile


@triton.jit
def exact_scores(s, position, high_i, low_i, j, high_j, low_j, seq_start, earliest, window):
    """Scores with the exact difference of c at each entry, and which entries count."""
    s += low_i[:, None] - low_j[None, :]
    s += high_i[:, None] - high_j[None, :]
    kept = position[:, None] >= j[None, :]
    if seq_start is not None:
        kept = kept & (j >= earliest)[None, :]
    if window is not None:
        kept = kept & (j[None, :] >= window_start(position, window)[:, None])
    return s, kept
