"""The forward kernel: one program per query tile, over its kept key tiles (Equations 1 and 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward import kernel_key, try_launch, why_portable
from .differences import load_pair, unpack
from .gates import decay_terms
from .launch import launch
from .query_tile import exact_scores, key_tiles, stream_keys
from .tiles import (
    COUNTS,
    GROUP,
    LOG2E,
    Tile,
    allocate_rows,
    can_stream,
    describe_stream,
    head_of,
    load_rows,
    make_addressable,
    padded_head_dim,
    product,
    room_for,
    share_of_work,
    store_rows,
    tiles_for,
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
    """Key tiles ``begin .. end`` with every mask, exact differences of c and the online softmax: m_i is
    each row's running maximum, in units of log 2, l_i its running sum."""
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
        # A row with no key so far: any finite number will do, every exponent is -inf.
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - m_finite[:, None])
        alpha = tl.math.exp2(m_i - m_finite)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = product(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


# Of float16, key tiles before the diagonal up to which all are taken with the online softmax.
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
    batch_heads,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    padded,
    row_tiles,
    row_blocks,
    window,
    scale,
    redo,
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
    bh, tile = share_of_work(batch_heads, row_tiles, group)
    tile = row_tiles - 1 - tile  # the last rows, which have the most keys, start first
    if redo is not None:  # what another kernel has done already, but for a few tiles
        redo += (bh.to(tl.int64) * row_tiles + tile) * 2
        if tl.load(redo) + tl.load(redo + 1) == 0:
            return
    row = tile * ROWS
    b = bh // heads
    h = bh % heads
    kv_h = h // SHARED  # the head of keys and values that SHARED query heads read
    q = head_of(q, b, h, q_b, q_h, False)
    k = head_of(k, b, kv_h, k_b, k_h, DESCRIPTORS)
    v = head_of(v, b, kv_h, v_b, v_h, DESCRIPTORS)
    out = head_of(out, b, h, o_b, o_h, False)
    bh = bh.to(tl.int64)
    pairs += bh * padded
    tail += bh * padded
    keys = (k, v, b, kv_h, k_t, v_t, seqlen_k)

    first = row + seqlen_k - seqlen_q  # absolute position of the tile's first query
    position = first + tl.arange(0, ROWS)
    inside = position < seqlen_k
    if boundary is not None:
        boundary = boundary + bh * row_blocks + row // BLOCK_Q
    start, diagonal, end, earliest, edge = key_tiles(
        first, boundary, seq_start, b, seqlen_k, window, ROWS, COLUMNS, BLOCK_K
    )

    q_tile = load_rows(q, row, q_t, seqlen_q, ROWS, D, BLOCK_D, True)
    # First the tiles on the diagonal: a row's own key has no decay, so they tell how large its
    # scores are. Of float16 also the one before them, or all if they are few.
    near = diagonal
    if q_tile.dtype == tl.float16:
        near -= tl.where(diagonal - start > _FEW, 1, diagonal - start)
    acc, l_i, m_i = _masked_tiles(
        q_tile, keys, pairs, first, seq_start, earliest, window, scale, near, end, COLUMNS, D, DESCRIPTORS
    )
    acc *= 2.0**-ROOM
    l_i *= 2.0**-ROOM

    # Then the decayed rest, against that fixed level: no running maximum, no rescaling. Scores
    # leave out c_i - c[first], the same for a whole row, and so does the level.
    high_base, low_base = unpack(tl.load(pairs + first))
    high_i, low_i = load_pair(pairs, position, inside)
    level = m_i - ((high_i - high_base) + (low_i - low_base)) + ROOM
    parts = tl.zeros([ROWS, 8], dtype=tl.float32)  # of the sum; a thread's own, so no exchange
    # What a tile needs of c is loaded one tile ahead; `tail` has room for the one past the end.
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
    # A score so far above those that its weight overflows is rare, and then the row is done again.
    # (Up to the limit, bfloat16 and float32 lose nothing; float16 ends at 65504.)
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
    store_rows(out, acc, row, o_t, seqlen_q, ROWS, D, BLOCK_D)
    i = row + tl.arange(0, ROWS)
    tl.store(lse + bh * seqlen_q + i, m_i + tl.math.log2(l_i * 2.0**ROOM), mask=inside)


def forward(
    q, k, v, c, boundary, seq_start, sm_scale, block_q, block_k, window_size=None, terms=None
) -> tuple[Tensor, Tensor]:
    """``O = softmax(sm_scale Q K^T + D) V`` over the kept blocks of the causal grid.

    q, k, v, seq_start and window_size are those of :class:`..checks.AttentionCall`, c is (B, H, Tk) float64.
    boundary (B, H, M) int32 does not fall from one query block to the next; None keeps every block. terms are
    those of c for :func:`terms_layout`, if they are there already.

    Returns:
        out like q, and lse (B, H, Tq) float32, the log to base 2 of each row's sum: as the backward pass
        wants it, and a change of base would round it once each way. A row with no key left has out 0 and
        lse -inf.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tile = tiles_for(q, block_q, block_k).forward
    if terms is None:
        terms = decay_terms(c.contiguous(), seq_start, *terms_layout(q, k, block_q, block_k))
    q, k, v = (make_addressable(x) for x in (q, k, v))
    boundary = None if boundary is None else boundary.contiguous()
    rows = allocate_rows(out)
    given = (q, k, v, rows, lse, terms, boundary, seq_start, sm_scale, block_q, block_k)
    redo = None
    faster = faster_forward(q, k, v, block_q, block_k, tile, window_size)
    if faster is not None:
        tiles = triton.cdiv(q.shape[2], tile.rows)
        marks = torch.empty((*q.shape[:2], tiles, 2), dtype=torch.int32, device=q.device)
        if try_launch(faster, (*given, marks), kernel_key(q, k, block_q, block_k)):
            redo = marks
    launch_forward(*given, tile, window_size, redo)
    if rows is not out:
        out.copy_(rows)
    return out, lse


def terms_layout(q, k, block_q, block_k) -> tuple[int, int]:
    """For which key tiles :func:`forward` takes the terms of c, and how far its heads are apart."""
    # Rows of the pairs start at multiples of 16 bytes, as the copy engine wants them.
    return tiles_for(q, block_q, block_k).forward.columns, triton.cdiv(k.shape[2], 4) * 4


def faster_forward(q, k, v, block_q, block_k, tile: Tile, window_size=None) -> Callable | None:
    """What does most of :func:`launch_forward`'s work, if a kernel for just this device and shape exists."""
    # At 64 dimensions the portable kernel took less time on an H200, at 4k to 16k
    # (docs/lab-notebook/attention-kernels.md).
    fits = q.shape[-1] == 128 and tile[:2] == (128, 64)
    if not fits or why_portable(q, k, v, block_q, block_k, window_size=window_size):
        return None
    from . import hopper

    return hopper.launch_forward


def launch_forward(
    q, k, v, out, lse, terms, boundary, seq_start, sm_scale, block_q, block_k, tile: Tile, window_size, redo
) -> None:
    """:func:`forward` into given tensors with a given tile; ``redo`` names the tiles that are left to do."""
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
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        batch * heads,
        heads,
        GROUP,
        seqlen_q,
        k.shape[2],
        terms.pairs.shape[2],
        row_tiles,
        triton.cdiv(seqlen_q, block_q),
        window_size,
        sm_scale * LOG2E.value,
        redo,
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
