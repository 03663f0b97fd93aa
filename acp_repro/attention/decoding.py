"""Attention of one or a few query tokens over a cache (Appendix F): its checks and its operator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .backends import find_backend
from .checks import check_seq_start, check_threshold, check_values
from .kvcache import PagedKVCache

# The most query rows that one program computes together: tokens times query heads that share keys.
MOST_ROWS = 64


def check_decode_arguments(
    q: Tensor, cache: PagedKVCache, start_block: Tensor, seq_start: Tensor | None, implementation: str
) -> None:
    """Checks shapes, dtypes and devices of a decoding call, q (B, H, T, D)."""
    find_backend(implementation, "auto")
    k, v, c, table, seqlens = cache
    batch, heads, seqlen_q, head_dim = q.shape
    if k.dim() != 3 or v.shape != k.shape or k.shape[2] != head_dim:
        raise ValueError(
            f"k and v must have shape (num_blocks, block_size, {head_dim}), got {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    block = k.shape[1]
    if block < 16 or block & (block - 1):
        raise ValueError(f"block_size must be a power of two of at least 16, got {block}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"k and v must have the dtype of q, {q.dtype}, got {k.dtype} and {v.dtype}")
    if table.dim() != 3 or table.dtype != torch.int32 or table.shape[0] != batch:
        raise ValueError(
            f"block_table must be int32 of shape ({batch}, kv_heads, max_blocks), got {table.dtype} "
            f"{tuple(table.shape)}"
        )
    if table.shape[1] == 0 or heads % table.shape[1]:
        raise ValueError(f"q must have a multiple of the cache's {table.shape[1]} heads, got {heads}")
    group = heads // table.shape[1]
    if c.dtype != torch.float64 or c.shape != (k.shape[0], group, block):
        raise ValueError(
            f"c must be float64 of shape {(k.shape[0], group, block)}, got {c.dtype} {tuple(c.shape)}"
        )
    if seqlens.dtype != torch.int32 or seqlens.shape != (batch,):
        raise ValueError(
            f"seqlens must be int32 of shape ({batch},), got {seqlens.dtype} {tuple(seqlens.shape)}"
        )
    if start_block.dtype != torch.int32 or start_block.shape != (batch, heads):
        raise ValueError(
            f"start_block must be int32 of shape {(batch, heads)}, got {start_block.dtype} "
            f"{tuple(start_block.shape)}"
        )
    if not 1 <= seqlen_q * group <= MOST_ROWS:
        raise ValueError(
            f"query tokens times query heads of one key head must be 1 to {MOST_ROWS}, got "
            f"{seqlen_q} * {group}; use forgetting_attention for longer chunks"
        )
    for name, x in (("k", k), ("v", v), ("c", c), ("block_table", table), ("start_block", start_block)):
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if seqlens.device != q.device:
        raise ValueError(f"seqlens must be on the device of q, {q.device}, got {seqlens.device}")
    check_seq_start(seq_start, q)


def run_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    block_table: Tensor,
    seqlens: Tensor,
    start_block: Tensor,
    threshold: Tensor | None,
    seq_start: Tensor | None,
    sm_scale: float,
    implementation: str,
    window_size: int | None = None,
) -> Tensor:
    """Output (B, H, T, D) in the dtype of q; ``start_block`` is moved forward."""
    columns = block_table.shape[2]
    check_threshold(threshold)
    check_values("seq_start", seq_start, 0, math.inf)
    check_values("block_table", block_table, 0, len(k) - 1)
    check_values("seqlens", seqlens, 0, columns * k.shape[1])
    check_values("start_block", start_block, 0, columns)
    cache = PagedKVCache(k, v, c, block_table, seqlens)
    options = (threshold, seq_start, sm_scale, window_size)
    return find_backend(implementation).decode(q, cache, start_block, *options)


decode_op = torch.library.custom_op(
    "acp_repro::forgetting_attention_with_kvcache", run_decode, mutates_args=("start_block",)
)


@decode_op.register_fake
def _(q, *_):
    return torch.empty_like(q)
