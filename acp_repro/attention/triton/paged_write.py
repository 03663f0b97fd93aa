"""New keys, values and decays into the blocks of a cache, in one kernel: those of a step, or of a prefill."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..decay import LOG_FGATE_FLOOR
from ..kvcache import PagedKVCache
from .launch import launch
from .tiles import make_addressable, padded_head_dim

_FLOOR = tl.constexpr(LOG_FGATE_FLOOR)


@triton.jit(do_not_specialize=["kv_heads", "max_blocks"])
def _write_kernel(
    k,
    v,
    log_fgate,
    k_cache,
    v_cache,
    c,
    table,
    seqlens,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    f_b,
    f_h,
    f_t,
    kv_heads,
    max_blocks,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    bh = tl.program_id(0)
    b = (bh // kv_heads).to(tl.int64)
    h = (bh % kv_heads).to(tl.int64)
    table += bh.to(tl.int64) * max_blocks
    first = tl.load(seqlens + b) - TOKENS
    i = tl.arange(0, ROWS)
    position = first + i
    real = (i < TOKENS) & (position >= 0)
    page = tl.load(table + position // BLOCK, mask=real, other=0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < D)[None, :]
    target = ((page * BLOCK + position % BLOCK) * D)[:, None] + d[None, :]
    key = tl.load(k + (b * k_b + h * k_h) + (i * k_t)[:, None] + d[None, :], mask=inside)
    tl.store(k_cache + target, key, mask=inside)
    value = tl.load(v + (b * v_b + h * v_h) + (i * v_t)[:, None] + d[None, :], mask=inside)
    tl.store(v_cache + target, value, mask=inside)
    before = tl.maximum(first - 1, 0)
    page_before = tl.load(table + before // BLOCK).to(tl.int64)
    for g in tl.static_range(GROUP):
        last = c + (page_before * GROUP + g) * BLOCK + before % BLOCK
        base = tl.load(last, mask=first > 0, other=0.0)
        gate = tl.load(
            log_fgate + (b * f_b + (h * GROUP + g) * f_h) + i.to(tl.int64) * f_t, mask=real, other=0.0
        )
        gate = tl.maximum(gate.to(tl.float64), _FLOOR, propagate_nan=tl.PropagateNan.ALL)
        tl.store(c + (page * GROUP + g) * BLOCK + position % BLOCK, base + tl.cumsum(gate, 0), mask=real)


def write_kvcache(cache: PagedKVCache, k: Tensor, v: Tensor, log_fgate: Tensor) -> None:
    """:meth:`PagedKVCache.write` in one kernel, for some tokens; k and v are in the cache's dtype."""
    # A kernel reads memory as it stands, so signs that PyTorch has only noted are turned first.
    k, v, log_fgate = (x.resolve_neg() for x in (k, v, log_fgate))
    k, v = (make_addressable(x) for x in (k, v))
    batch, kv_heads, tokens, head_dim = k.shape
    launch(
        _write_kernel,
        (batch * kv_heads,),
        k,
        v,
        log_fgate,
        cache.k,
        cache.v,
        cache.c,
        cache.block_table,
        cache.seqlens.contiguous(),
        *k.stride()[:3],
        *v.stride()[:3],
        *log_fgate.stride(),
        kv_heads,
        cache.block_table.shape[2],
        TOKENS=tokens,
        ROWS=triton.next_power_of_2(tokens),
        GROUP=cache.c.shape[1],
        BLOCK=cache.block_size,
        D=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["kv_heads", "max_blocks", "tokens", "columns"])
def _write_blocks_kernel(
    k,
    v,
    c_new,
    k_cache,
    v_cache,
    c,
    table,
    seqlens,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    kv_heads,
    max_blocks,
    tokens,
    columns,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    bh = tl.program_id(0) // columns
    b = (bh // kv_heads).to(tl.int64)
    h = (bh % kv_heads).to(tl.int64)
    first = tl.load(seqlens + b) - tokens
    n = tl.maximum(first, 0) // BLOCK + tl.program_id(0) % columns
    slot = tl.arange(0, BLOCK)
    i = (n * BLOCK + slot - first).to(tl.int64)  # counted from the first new token
    real = (i >= 0) & (i < tokens)
    if n * BLOCK < first + tokens:
        page = tl.load(table + bh.to(tl.int64) * max_blocks + n).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        inside = real[:, None] & (d < D)[None, :]
        target = (page * BLOCK + slot)[:, None] * D + d[None, :]
        key = tl.load(k + (b * k_b + h * k_h) + (i * k_t)[:, None] + d[None, :], mask=inside)
        tl.store(k_cache + target, key, mask=inside)
        value = tl.load(v + (b * v_b + h * v_h) + (i * v_t)[:, None] + d[None, :], mask=inside)
        tl.store(v_cache + target, value, mask=inside)
        for g in tl.static_range(GROUP):
            sums = tl.load(c_new + (bh.to(tl.int64) * GROUP + g) * tokens + i, mask=real)
            tl.store(c + (page * GROUP + g) * BLOCK + slot, sums, mask=real)


def write_blocks(cache: PagedKVCache, k: Tensor, v: Tensor, c: Tensor) -> None:
    """:meth:`PagedKVCache.write` of many tokens, whose running sums ``c`` (B, H, T) float64 are known."""
    k, v = (make_addressable(x) for x in (k, v))
    batch, kv_heads, tokens, head_dim = k.shape
    columns = triton.cdiv(tokens, cache.block_size) + 1  # the first new token may stand in a block's middle
    launch(
        _write_blocks_kernel,
        (batch * kv_heads * columns,),
        k,
        v,
        c.contiguous(),
        cache.k,
        cache.v,
        cache.c,
        cache.block_table,
        cache.seqlens.contiguous(),
        *k.stride()[:3],
        *v.stride()[:3],
        kv_heads,
        cache.block_table.shape[2],
        tokens,
        columns,
        GROUP=cache.c.shape[1],
        BLOCK=cache.block_size,
        D=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=4,
    )
