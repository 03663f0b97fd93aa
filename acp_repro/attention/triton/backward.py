"""The backward kernels: a query side (dQ, row sums of dS) and a key side (dK, dV, column sums).

    P = exp(S - lse),  dP = dO V^T,  dS = P * (dP - delta),  delta_i = sum_d dO_id O_id
    dQ = sm_scale dS K,  dK = sm_scale dS^T Q,  dV = P^T dO,  dc_i = sum_j dS_ij - sum_j dS_ji

Each side computes the scores again. That costs two products more than one fused kernel, and buys
sums in a fixed order: the same inputs give the same bits.

In exact arithmetic the row sums of dS are 0. In bfloat16 they are small residues of a rounded
output, but the gradient of a gate is a sum of thousands of them, in which they cancel the same
residues of the column sums. So both are taken, over the same entries and with the same delta.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decay import decay_terms, load_pair, pack, unpack
from .tiles import (
    COUNTS,
    GROUP,
    LOG2E,
    Tiles,
    addressable,
    can_stream,
    empty_rows_like,
    head_of,
    launch_order,
    load_rows,
    on_device_of,
    padded_head_dim,
    product,
    share_of_work,
    store_rows,
    stream_rows,
    streamed,
    tiles_for,
)


@triton.jit
def _query_side_masked(
    acc, parts, q_tile, g_tile, k, v, pairs, b, h, k_t, v_t, position, high_i, low_i,
    level_i, delta_i, seqlen_k, earliest, scale, begin, end,
    COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_START: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Adds key tiles ``begin .. end`` with every mask and exact differences of c."""
    ROWS: tl.constexpr = q_tile.shape[0]
    for n in tl.range(begin, end):
        column = n * COLUMNS
        j = column + tl.arange(0, COLUMNS)
        k_tile = stream_rows(k, b, h, column, k_t, seqlen_k, COLUMNS, D, BLOCK_D, True, DESCRIPTORS)
        v_tile = stream_rows(v, b, h, column, v_t, seqlen_k, COLUMNS, D, BLOCK_D, True, DESCRIPTORS)
        high_j, low_j = load_pair(pairs, j, j < seqlen_k)
        s = product(q_tile, tl.trans(k_tile), None) * scale
        dp = product(g_tile, tl.trans(v_tile), None)
        s += low_i[:, None] - low_j[None, :]
        s += high_i[:, None] - high_j[None, :]
        kept = position[:, None] >= j[None, :]
        if HAS_START:
            kept = kept & (j >= earliest)[None, :]
        p = tl.math.exp2(tl.where(kept, s - level_i[:, None], float("-inf")))
        ds = p * (dp - delta_i[:, None])
        parts += tl.sum(tl.reshape(ds, [ROWS, COLUMNS // 8, 8]), 1)
        acc = product(ds.to(k_tile.dtype), k_tile, acc)
    return acc, parts


@triton.jit(do_not_specialize=COUNTS)
def _query_side_kernel(
    q, k, v, out, dout, lse, dq, row_sums, levels, queries, pairs, tail, boundary, seq_start,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    batch_heads, heads, group, seqlen_q, seqlen_k, row_tiles, row_blocks, key_rows, scale, sm_scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SHARED: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr, HAS_START: tl.constexpr, DESCRIPTORS: tl.constexpr,
    HEAVIEST_FIRST: tl.constexpr,
):  # fmt: skip
    bh, tile = share_of_work(batch_heads, row_tiles, group)
    row = (row_tiles - 1 - tile if HEAVIEST_FIRST else tile) * ROWS  # late rows are the longest
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

    r = tl.arange(0, ROWS)
    i = row + r
    first = row + seqlen_k - seqlen_q  # absolute position of the tile's first query
    position = first + r
    inside = i < seqlen_q
    start = 0
    earliest = 0
    if HAS_BOUNDARY:
        start = tl.load(boundary + bh * row_blocks + row // BLOCK_Q) * (BLOCK_K // COLUMNS)
    if HAS_START:
        earliest = tl.minimum(tl.load(seq_start + b), seqlen_k).to(tl.int32)
        start = tl.maximum(start, earliest // COLUMNS)
    diagonal = tl.maximum((first + 1) // COLUMNS, start)  # tiles before it end at or before `first`
    end = tl.cdiv(tl.minimum(first + ROWS, seqlen_k), COLUMNS)

    q_tile = load_rows(q, row, q_t, seqlen_q, ROWS, D, BLOCK_D, True)
    g_tile = load_rows(dout, row, g_t, seqlen_q, ROWS, D, BLOCK_D, True)
    o_tile = load_rows(out, row, o_t, seqlen_q, ROWS, D, BLOCK_D, True)
    delta_i = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
    level_i = tl.load(lse + bh * seqlen_q + i, mask=inside, other=float("inf")) * LOG2E
    # A row with no key has lse = -inf; its weights are 0, as those of a row with lse = +inf.
    level_i = tl.where(level_i == float("-inf"), float("inf"), level_i)
    high_i, low_i = load_pair(pairs, position, inside)
    high_base, low_base = unpack(tl.load(pairs + first))
    shifted_i = level_i - ((high_i - high_base) + (low_i - low_base))
    # For the key side, in pairs: lse and delta; c_i - c[first position of i's tile there] - lse,
    # and delta.
    high_first, low_first = load_pair(
        pairs, (i // key_rows) * key_rows + (seqlen_k - seqlen_q), inside
    )
    to_add = ((high_i - high_first) + (low_i - low_first)) - level_i
    tl.store(levels + bh * seqlen_q + i, pack(level_i, delta_i), mask=inside)
    tl.store(queries + bh * seqlen_q + i, pack(to_add, delta_i), mask=inside)
    parts = tl.zeros([ROWS, 8], dtype=tl.float32)  # of the row sums; a thread's own, no exchange
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)

    # What a tile needs of c is loaded one tile ahead; `tail` has room for the one past the end.
    bias = tl.load(tail + start * COLUMNS + tl.arange(0, COLUMNS))
    pair_end = tl.load(pairs + tl.minimum(start * COLUMNS + (COLUMNS - 1), seqlen_k - 1))
    for n in tl.range(start, diagonal):
        column = n * COLUMNS
        k_tile = stream_rows(
            k, b, kv_h, column, k_t, seqlen_k, COLUMNS, D, BLOCK_D, False, DESCRIPTORS
        )
        v_tile = stream_rows(
            v, b, kv_h, column, v_t, seqlen_k, COLUMNS, D, BLOCK_D, False, DESCRIPTORS
        )
        high_end, low_end = unpack(pair_end)
        gap = (high_base - high_end) + (low_base - low_end)
        pair_end = tl.load(pairs + tl.minimum(column + (2 * COLUMNS - 1), seqlen_k - 1))
        s = product(q_tile, tl.trans(k_tile), None)
        dp = product(g_tile, tl.trans(v_tile), None)
        p = tl.math.exp2(s * scale + bias[None, :] - (shifted_i - gap)[:, None])
        bias = tl.load(tail + (column + COLUMNS) + tl.arange(0, COLUMNS))
        ds = p * (dp - delta_i[:, None])
        parts += tl.sum(tl.reshape(ds, [ROWS, COLUMNS // 8, 8]), 1)
        acc = product(ds.to(k_tile.dtype), k_tile, acc)

    acc, parts = _query_side_masked(
        acc, parts, q_tile, g_tile, k, v, pairs, b, kv_h, k_t, v_t, position, high_i, low_i,
        level_i, delta_i, seqlen_k, earliest, scale, diagonal, end,
        COLUMNS, D, BLOCK_D, HAS_START, DESCRIPTORS,
    )  # fmt: skip

    store_rows(dq, acc * sm_scale, row, dq_t, seqlen_q, ROWS, D, BLOCK_D)
    tl.store(row_sums + bh * seqlen_q + i, tl.sum(parts, 1), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _key_side_kernel(
    q, k, v, dout, dk, dv, dc, row_sums, levels, queries, pairs, boundary, seq_start,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    batch_heads, heads, group, seqlen_q, seqlen_k, row_blocks, scale, sm_scale,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SHARED: tl.constexpr,
    RAGGED: tl.constexpr, COUNT: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr, HAS_START: tl.constexpr, DESCRIPTORS: tl.constexpr,
    HEAVIEST_FIRST: tl.constexpr,
):  # fmt: skip
    # Everything here is transposed, (keys, queries): an operand of a product is then a loaded tile
    # or a score tile as it was computed, never the transpose of a computed one.
    column_tiles = tl.cdiv(seqlen_k, COLUMNS)
    bh, tile = share_of_work(batch_heads, column_tiles, group)
    column = (
        tile if HEAVIEST_FIRST else column_tiles - 1 - tile
    ) * COLUMNS  # early keys: most rows
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
    if HAS_START:
        earliest = tl.load(seq_start + b)
        valid = valid & (j >= earliest)
        below = tl.where(last < earliest, begin, below)
    if HAS_BOUNDARY:
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
        p = tl.math.exp2(tl.where(kept, s - level_i[None, :], float("-inf")))
        dv_acc = product(p.to(g_tile.dtype), g_tile, dv_acc)
        ds = p * (dp - delta_i[None, :])
        parts += tl.sum(tl.reshape(ds, [COLUMNS, ROWS // 8, 8]), 1)
        dk_acc = product(ds.to(q_tile.dtype), q_tile, dk_acc)

    end = tl.cdiv(seqlen_q, ROWS)
    if HAS_BOUNDARY:
        # The boundary never falls from row to row, so counting the rows of blocks that keep this
        # key block gives the end of the last one.
        count = tl.sum((starts <= column // BLOCK_K).to(tl.int32), 0)
        for chunk in range(COUNT, row_blocks, COUNT):
            block = chunk + tl.arange(0, COUNT)
            starts = tl.load(boundary + block, mask=block < row_blocks, other=2147483647)
            count += tl.sum((starts <= column // BLOCK_K).to(tl.int32), 0)
        end = tl.minimum(end, count * (BLOCK_Q // ROWS))
    if HAS_START:
        end = tl.where(last < earliest, 0, end)
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
        p = tl.math.exp2(s * scale + shifted_i[None, :] + (rise + gap)[:, None])
        dv_acc = product(p.to(g_tile.dtype), g_tile, dv_acc)
        ds = p * (dp - delta_i[None, :])
        parts += tl.sum(tl.reshape(ds, [COLUMNS, ROWS // 8, 8]), 1)
        dk_acc = product(ds.to(q_tile.dtype), q_tile, dk_acc)

    store_rows(dk, dk_acc * sm_scale, column, dk_t, seqlen_k, COLUMNS, D, BLOCK_D)
    store_rows(dv, dv_acc, column, dv_t, seqlen_k, COLUMNS, D, BLOCK_D)
    has_row = (j >= shift) & (j < seqlen_k)
    own = tl.load(row_sums + bh * seqlen_q + (j - shift), mask=has_row, other=0.0)
    tl.store(dc + bh * seqlen_k + j, own - tl.sum(parts, 1), mask=j < seqlen_k)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    c: Tensor,
    boundary: Tensor | None,
    seq_start: Tensor | None,
    sm_scale: float,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`.forward.forward` over the same kept blocks.

    Args:
        dout: (B, H, Tq, D), any strides. The rest as given to and returned by ``forward``.

    Returns:
        dq, dk, dv like q, k, v, and dc (B, H, Tk) float32, the gradient with respect to c: row sums
        minus column sums of dS.
    """
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dc = torch.empty(c.shape, dtype=torch.float32, device=q.device)
    grads = [empty_rows_like(x) for x in (dq, dk, dv)]
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads:
        # The key side writes each query head's share, and a sum in a fixed order follows.
        shape = (k.shape[0], heads, *k.shape[2:])
        grads[1:] = torch.empty((2, *shape), dtype=torch.float32, device=q.device)
    boundary = None if boundary is None else boundary.contiguous()
    dout, q, k, v, out = (addressable(x) for x in (dout, q, k, v, out))
    launch = faster_launch(dout, q, k, v, block_q, block_k)
    if launch is None:
        launch = functools.partial(launch_backward, tiles=tiles_for(q, block_q, block_k))
    with on_device_of(q):
        launch(dout, q, k, v, out, lse.contiguous(), c.contiguous(), boundary, seq_start, sm_scale,
               block_q, block_k, *grads, dc)  # fmt: skip
    if heads != kv_heads:
        grads[1:] = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in grads[1:])
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        if given is not grad:
            given.copy_(grad)
    return dq, dk, dv, dc


def faster_launch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, block_q: int, block_k: int
) -> Callable | None:
    """What to call in place of :func:`launch_backward`, if kernels for just this device and shape exist.

    The one place where a path is chosen. :func:`.hopper.why_not` tells why there is none for an input;
    ``ACP_REPRO_PORTABLE=1`` in the environment keeps every input to the kernels of this module.
    """
    if os.environ.get("ACP_REPRO_PORTABLE") == "1" or not can_stream(q, k, v, dout):
        return None
    try:
        from . import hopper
    except ImportError:  # a Triton without Gluon, or with a Gluon that has other names
        return None
    return None if hopper.why_not(q, k, block_q, block_k) else hopper.launch_backward


def launch_backward(
    dout, q, k, v, out, lse, c, boundary, seq_start, sm_scale, block_q, block_k,
    dq, dk, dv, dc, tiles: Tiles, descriptors: bool | None = None,
) -> None:  # fmt: skip
    """:func:`backward` into given tensors by the kernels of this module, which run on every device.

    All are contiguous in their last dimension, and those without one of D in every one.

    dk and dv have a head for each query head: where heads of keys are shared, the shares of their sum.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    _, query, key = tiles
    if descriptors is None:
        descriptors = can_stream(q, k, v, dout)
    common = {
        "BLOCK_Q": block_q, "BLOCK_K": block_k, "D": head_dim, "BLOCK_D": padded_head_dim(head_dim),
        "SHARED": heads // k.shape[1], "HAS_BOUNDARY": boundary is not None,
        "HAS_START": seq_start is not None, "DESCRIPTORS": descriptors, **launch_order(),
    }  # fmt: skip
    row_blocks = triton.cdiv(seqlen_q, block_q)
    row_tiles = triton.cdiv(seqlen_q, query.rows)
    scale = sm_scale * LOG2E.value
    levels, queries = torch.empty((2, *lse.shape), dtype=torch.int64, device=q.device)
    row_sums = torch.empty_like(lse)
    terms = decay_terms(c, seq_start, query.columns)
    with on_device_of(q):
        _query_side_kernel[(row_tiles * batch * heads,)](
            q, streamed(k, query.columns, descriptors), streamed(v, query.columns, descriptors),
            out, dout, lse, dq, row_sums, levels, queries, *terms, boundary, seq_start,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *dout.stride()[:3], *dq.stride()[:3], batch * heads, heads, GROUP, seqlen_q, seqlen_k,
            row_tiles, row_blocks, key.rows, scale, sm_scale,
            ROWS=query.rows, COLUMNS=query.columns, **common, **query.options(q.device),
        )  # fmt: skip
        _key_side_kernel[(triton.cdiv(seqlen_k, key.columns) * batch * heads,)](
            streamed(q, key.rows, descriptors), k, v, streamed(dout, key.rows, descriptors),
            dk, dv, dc, row_sums, levels, queries, terms.pairs, boundary, seq_start,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3],
            *dk.stride()[:3], *dv.stride()[:3],
            batch * heads, heads, GROUP, seqlen_q, seqlen_k, row_blocks, scale, sm_scale,
            ROWS=key.rows, COLUMNS=key.columns, RAGGED=seqlen_q % key.rows != 0, COUNT=256,
            **common, **key.options(q.device),
        )  # fmt: skip
