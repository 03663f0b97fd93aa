"""One kernel that writes the keys, values and decays of new tokens to a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..decay import LOG_FGATE_FLOOR
from ..kvcache import PagedKVCache
from .launch import launch
from .tiles import head_of, make_addressable, padded_head_dim, strides_of

_FLOOR = tl.constexpr(LOG_FGATE_FLOOR)


@triton.jit(do_not_specialize=["kv_heads", "max_blocks", "tokens", "tiles"])
def _write_kernel(
    k,
    v,
    log_fgate,
    c_new,
    k_cache,
    v_cache,
    c,
    table,
    seqlens,
    k_strides,
    v_strides,
    gate_strides,
    kv_heads,
    max_blocks,
    tokens,
    tiles,
    ROWS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Writes one tile of the new tokens of one head; c is ``c_new``, or is summed from ``log_fgate``."""
    bh = tl.program_id(0) // tiles
    b = bh // kv_heads
    h = bh % kv_heads
    table += bh.to(tl.int64) * max_blocks
    first = tl.load(seqlens + b) - tokens
    i = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    position = first + i
    real = (i < tokens) & (position >= 0)
    page = tl.load(table + position // BLOCK, mask=real, other=0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < D)[None, :]
    target = ((page * BLOCK + position % BLOCK) * D)[:, None] + d[None, :]
    i = i.to(tl.int64)
    key = tl.load(
        head_of(k, b, h, k_strides, False) + (i * k_strides.token)[:, None] + d[None, :], mask=inside
    )
    tl.store(k_cache + target, key, mask=inside)
    value = tl.load(
        head_of(v, b, h, v_strides, False) + (i * v_strides.token)[:, None] + d[None, :], mask=inside
    )
    tl.store(v_cache + target, value, mask=inside)
    before = tl.maximum(first - 1, 0)
    page_before = tl.load(table + before // BLOCK).to(tl.int64)
    for g in tl.static_range(SHARED):
        if c_new is None:
            last = c + (page_before * SHARED + g) * BLOCK + before % BLOCK
            base = tl.load(last, mask=first > 0, other=0.0)
            gates = head_of(log_fgate, b, h * SHARED + g, gate_strides, False)
            gate = tl.load(gates + i * gate_strides.token, mask=real, other=0.0)
            gate = tl.maximum(gate.to(tl.float64), _FLOOR, propagate_nan=tl.PropagateNan.ALL)
            sums = base + tl.cumsum(gate, 0)
        else:
            sums = tl.load(c_new + (bh.to(tl.int64) * SHARED + g) * tokens + i, mask=real)
        tl.store(c + (page * SHARED + g) * BLOCK + position % BLOCK, sums, mask=real)


def write_kvcache(cache: PagedKVCache, k: Tensor, v: Tensor, log_fgate: Tensor, c: Tensor | None = None):
    """:meth:`PagedKVCache.write` in one kernel; k and v are in the cache's dtype.

    ``c`` (B, H, T) float64 are the running sums of the tokens, if known. Several programs then share the
    tokens of one head.
    """
    # A kernel reads raw memory, so lazy negations of PyTorch are materialised first.
    k, v, log_fgate = (x.resolve_neg() for x in (k, v, log_fgate))
    k, v = (make_addressable(x) for x in (k, v))
    batch, kv_heads, tokens, head_dim = k.shape
    rows = triton.next_power_of_2(tokens)
    if c is not None:
        rows, c = min(rows, cache.block_size), c.contiguous()
    tiles = triton.cdiv(tokens, rows)
    launch(
        _write_kernel,
        (batch * kv_heads * tiles,),
        k,
        v,
        log_fgate,
        c,
        cache.k,
        cache.v,
        cache.c,
        cache.block_table,
        cache.seqlens.contiguous(),
        *map(strides_of, (k, v, log_fgate)),
        kv_heads,
        cache.block_table.shape[2],
        tokens,
        tiles,
        ROWS=rows,
        SHARED=cache.c.shape[1],
        BLOCK=cache.block_size,
        D=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=1 if c is None else 4,
    )
