"""Decoding in two kernels: one splits the kept blocks of each head over programs, one joins their results.

The grid depends on shapes only. The programs read lengths and boundaries on the device, and programs without
work return at once. The host therefore never synchronises, and a CUDA graph can capture the launch. A local
head reads few blocks and occupies few programs, which leaves the others to global heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kvcache import PagedKVCache
from .launch import launch
from .tiles import (
    LOG2E,
    allocate_rows,
    head_of,
    make_addressable,
    padded_head_dim,
    product,
    strides_of,
    window_start,
)

# Programs per multiprocessor: more programs balance heads of different lengths; fewer leave less to join.
_PROGRAMS_PER_PROCESSOR = 32
_MOST_SPLITS = 64
# The smallest number of blocks that justifies one more program.
_LEAST_BLOCKS = 2
_WARPS = 4
_STAGE_BYTES = 96 << 10
# Blocks whose decay is tested in one step of the boundary search.
_STEP = 32


@triton.jit
def _first_block(
    c,
    table,
    start,
    threshold,
    h,
    g,
    diagonal,
    first,
    earliest,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The first block that query head ``h`` reads: ``start[h]``, advanced past the padding and as far as the
    oldest query, at position ``first``, allows. All programs of a head find the same block, whether or not
    another program has stored it already. The search begins after the padding, because the table entries of
    padding are arbitrary."""
    s = tl.maximum(tl.load(start + h), earliest // BLOCK)
    if threshold is not None:
        delta = tl.load(threshold + h).to(tl.float64)
        page_first = tl.load(table + first // BLOCK).to(tl.int64)
        c_first = tl.load(c + (page_first * SHARED + g) * BLOCK + first % BLOCK)
        more = s < diagonal
        while more:
            n = s + tl.arange(0, STEP)
            inside = n < diagonal
            page = tl.load(table + n, mask=inside, other=0).to(tl.int64)
            end = tl.load(c + (page * SHARED + g) * BLOCK + (BLOCK - 1), mask=inside, other=0.0)
            pruned = inside & (c_first - end < delta)
            count = tl.sum(pruned.to(tl.int32), 0)
            s += count
            more = count == STEP
    return tl.minimum(s, diagonal)


@triton.jit(do_not_specialize=["batch_heads", "kv_heads", "max_blocks", "window"])
def _split_kernel(
    q,
    k,
    v,
    c,
    table,
    seqlens,
    start,
    threshold,
    seq_start,
    part,
    level,
    total,
    q_strides,
    batch_heads,
    kv_heads,
    max_blocks,
    window,
    scale,
    TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
):
    bh = tl.program_id(0) % batch_heads  # the head of keys and values
    split = tl.program_id(0) // batch_heads
    b = bh // kv_heads
    table += bh.to(tl.int64) * max_blocks
    length = tl.load(seqlens + b)
    r = tl.arange(0, ROWS)
    position = length - TOKENS + r % TOKENS  # negative if the row has fewer tokens; such queries see no key
    first = tl.maximum(length - TOKENS, 0)
    diagonal = first // BLOCK
    earliest = 0
    if seq_start is not None:
        earliest = tl.minimum(tl.load(seq_start + b), length).to(tl.int32)
    if window is not None:
        earliest = tl.maximum(earliest, window_start(first, window))  # the window of the oldest query

    g_row = r // TOKENS
    real = r < SHARED * TOKENS
    begin = diagonal
    oldest = tl.zeros([ROWS], dtype=tl.int32)  # the first key of each row
    for g in tl.static_range(SHARED):
        begin_g = _first_block(
            c, table, start, threshold, bh * SHARED + g, g, diagonal, first, earliest, SHARED, BLOCK, STEP
        )
        if split == 0:
            tl.store(start + bh * SHARED + g, begin_g)
        begin = tl.minimum(begin, begin_g)
        oldest = tl.where(g_row == g, begin_g * BLOCK, oldest)
    oldest = tl.maximum(oldest, earliest)
    if window is not None:
        oldest = tl.maximum(oldest, window_start(position, window))

    blocks = tl.cdiv(length, BLOCK)
    share = tl.maximum(tl.cdiv(blocks - begin, SPLITS), LEAST)
    low = begin + split * share
    high = tl.minimum(low + share, blocks)
    if low < high:
        token = tl.maximum(position, 0)
        page_row = tl.load(table + token // BLOCK, mask=real, other=0).to(tl.int64)
        c_row = tl.load(c + (page_row * SHARED + g_row) * BLOCK + token % BLOCK, mask=real, other=0.0)
        d = tl.arange(0, BLOCK_D)
        q_rows = head_of(q, b, (bh % kv_heads) * SHARED + g_row, q_strides, False)
        q_rows = (q_rows + (r % TOKENS) * q_strides.token)[:, None] + d[None, :]
        q_tile = tl.load(q_rows, mask=real[:, None] & (d < D)[None, :], other=0.0)
        m_i = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        l_i = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
        slot = tl.arange(0, BLOCK)
        tile = slot[:, None] * D + d[None, :]
        for n in tl.range(low, high):
            page = tl.load(table + n).to(tl.int64)
            j = n * BLOCK + slot
            live = j < length
            if seq_start is not None:
                live = live & (j >= earliest)
            # Unwritten entries are masked at the load, because they may be NaN and NaN * 0 is NaN.
            inside = live[:, None]
            if D != BLOCK_D:
                inside = inside & (d < D)[None, :]
            k_tile = tl.load(k + page * (BLOCK * D) + tile, mask=inside, other=0.0)
            v_tile = tl.load(v + page * (BLOCK * D) + tile, mask=inside, other=0.0)
            kept = (j[None, :] <= position[:, None]) & (j[None, :] >= oldest[:, None])
            s = product(q_tile, tl.trans(k_tile), None) * scale
            if SHARED * TOKENS == 1:
                c_j = tl.load(c + page * BLOCK + slot, mask=live, other=0.0)
                c_i = tl.sum(tl.where(r == 0, c_row, 0.0), 0)
                s += ((c_i - c_j) * LOG2E).to(tl.float32)[None, :]
            else:
                at = (page * SHARED + g_row)[:, None] * BLOCK + slot[None, :]
                c_j = tl.load(c + at, mask=real[:, None] & live[None, :], other=0.0)
                s += ((c_row[:, None] - c_j) * LOG2E).to(tl.float32)
            s = tl.where(kept, s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
            m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf: no key in this row yet
            p = tl.math.exp2(s - m_finite[:, None])
            alpha = tl.math.exp2(m_i - m_finite)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = product(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
            m_i = m_new
        row = (bh.to(tl.int64) * SPLITS + split) * ROWS
        tl.store(level + row + r, m_i)
        tl.store(total + row + r, l_i)
        tl.store(part + (row + r)[:, None] * BLOCK_D + d[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["kv_heads"])
def _combine_kernel(
    part,
    level,
    total,
    out,
    seqlens,
    start,
    o_strides,
    kv_heads,
    TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    bh = tl.program_id(0) // (SHARED * TOKENS)
    r = tl.program_id(0) % (SHARED * TOKENS)
    b = bh // kv_heads
    blocks = tl.cdiv(tl.load(seqlens + b), BLOCK)
    begin = blocks
    for g in tl.static_range(SHARED):
        begin = tl.minimum(begin, tl.load(start + bh * SHARED + g))
    share = tl.maximum(tl.cdiv(blocks - begin, SPLITS), LEAST)
    split = tl.arange(0, SPLITS)
    written = begin + split * share < blocks
    row = (bh.to(tl.int64) * SPLITS + split) * ROWS + r
    m = tl.load(level + row, mask=written, other=float("-inf"))
    l_i = tl.load(total + row, mask=written, other=0.0)
    m_max = tl.max(m, 0)
    weight = tl.math.exp2(m - tl.where(m_max == float("-inf"), 0.0, m_max))
    d = tl.arange(0, BLOCK_D)
    acc = tl.load(part + row[:, None] * BLOCK_D + d[None, :], mask=written[:, None], other=0.0)
    denominator = tl.sum(weight * l_i, 0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(denominator == 0.0, 1.0, denominator)
    h = (bh % kv_heads) * SHARED + r // TOKENS
    out = head_of(out, b, h, o_strides, False) + (r % TOKENS) * o_strides.token
    tl.store(out + d, result.to(out.dtype.element_ty), mask=d < D)


def decode(
    q: Tensor, cache: PagedKVCache, start_block, threshold, seq_start, sm_scale, window_size=None
) -> Tensor:
    """Output (B, H, T, D) of the newest tokens; advances ``start_block`` in place."""
    batch, kv_heads, max_blocks = cache.block_table.shape
    heads, tokens, head_dim = q.shape[1:]
    out = torch.empty_like(q)
    q = make_addressable(q)
    seqlens = cache.seqlens.contiguous()
    seq_start = None if seq_start is None else seq_start.contiguous()
    rows = allocate_rows(out)
    shape = {
        "TOKENS": tokens,
        "SHARED": heads // kv_heads,
        "ROWS": max(16, triton.next_power_of_2(heads // kv_heads * tokens)),
        "BLOCK": cache.block_size,
        "D": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "SPLITS": num_splits(batch * kv_heads, max_blocks, q.device),
        "LEAST": _LEAST_BLOCKS,
    }
    parts = (batch * kv_heads, shape["SPLITS"], shape["ROWS"])
    part = torch.empty((*parts, shape["BLOCK_D"]), dtype=torch.float32, device=q.device)
    level, total = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
    launch(
        _split_kernel,
        (parts[0] * parts[1],),
        q,
        cache.k,
        cache.v,
        cache.c,
        cache.block_table,
        seqlens,
        start_block,
        threshold,
        seq_start,
        part,
        level,
        total,
        strides_of(q),
        batch * kv_heads,
        kv_heads,
        max_blocks,
        window_size,
        sm_scale * LOG2E.value,
        **shape,
        STEP=_STEP,
        num_warps=_WARPS,
        num_stages=_num_stages(cache),
    )
    launch(
        _combine_kernel,
        (batch * heads * tokens,),
        part,
        level,
        total,
        rows,
        seqlens,
        start_block,
        strides_of(rows),
        kv_heads,
        **shape,
        num_warps=max(1, min(8, shape["SPLITS"] * shape["BLOCK_D"] // 2048)),
    )
    if rows is not out:
        out.copy_(rows)
    return out


def _num_stages(cache: PagedKVCache) -> int:
    """The number of blocks to prefetch: as many as fit into the shared memory of every GPU."""
    block_bytes = 2 * cache.block_size * padded_head_dim(cache.k.shape[-1]) * cache.k.element_size()
    return max(2, min(4, _STAGE_BYTES // block_bytes))


def num_splits(batch_heads: int, max_blocks: int, device: torch.device) -> int:
    """Programs per key head: a power of two that depends only on shapes and the device."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = min(
        _PROGRAMS_PER_PROCESSOR * processors // batch_heads,
        triton.cdiv(max_blocks, _LEAST_BLOCKS),
        _MOST_SPLITS,
    )
    return triton.next_power_of_2(max(1, wanted))
