"""Attention of one or a few query tokens over a cache (Appendix F): argument checks and the operator."""

import math

import torch
from torch import Tensor

from .backends import find_backend
from .checks import check_gates, check_seq_start, check_threshold, check_values
from .kvcache import PagedKVCache

# The largest number of query rows of one program: tokens times query heads per key head.
MOST_ROWS = 64


def check_decode_arguments(
    q: Tensor, cache: PagedKVCache, start_block: Tensor | None, seq_start: Tensor | None
) -> None:
    """Checks the shapes, dtypes and devices of a decoding call with q (B, H, T, D)."""
    k, v, c, table, seqlens = cache[:5]
    batch, heads, seqlen_q, head_dim = q.shape
    if k.dim() != 3 or table.dim() != 3:
        raise ValueError(f"k and block_table must have 3 dimensions, got {k.dim()} and {table.dim()}")
    (blocks, block), kv_heads = k.shape[:2], table.shape[1]
    if block < 16 or block & (block - 1):
        raise ValueError(f"block_size must be a power of two of at least 16, got {block}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of the cache's {kv_heads} heads, got {heads}")
    group = heads // kv_heads
    if not 1 <= seqlen_q * group <= MOST_ROWS:
        raise ValueError(
            f"query tokens times query heads of one key head must be 1 to {MOST_ROWS}, got "
            f"{seqlen_q} * {group}; use forgetting_attention for longer chunks"
        )
    for name, x, dtype, shape in (
        ("cache.k", k, q.dtype, (blocks, block, head_dim)),
        ("cache.v", v, q.dtype, (blocks, block, head_dim)),
        ("cache.c", c, torch.float64, (blocks, group, block)),
        ("cache.block_table", table, torch.int32, (batch, kv_heads, table.shape[2])),
        ("start_block", start_block, torch.int32, (batch, heads)),
        ("cache.seqlens", seqlens, torch.int32, (batch,)),
    ):
        _check_tensor(name, x, dtype, shape, q.device)
        if x is not None and x is not seqlens and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    check_seq_start(seq_start, q)


def check_new_tokens(q: Tensor, cache: PagedKVCache, k, v, log_fgate, head_first: bool) -> None:
    """Checks the tokens that a call with q (B, H, T, D) appends: k, v and log_fgate in the call's layout."""
    batch, heads, tokens, head_dim = q.shape
    for name, x, dtype, own_heads, *size in (
        ("k", k, q.dtype, cache.block_table.shape[1], head_dim),
        ("v", v, q.dtype, cache.block_table.shape[1], head_dim),
        ("log_fgate", log_fgate, torch.float32, heads),
    ):
        order = (own_heads, tokens) if head_first else (tokens, own_heads)
        _check_tensor(name, x, dtype, (batch, *order, *size), q.device)
    check_gates(log_fgate)
    check_values(
        "cache.seqlens", cache.seqlens, 0, cache.capacity - tokens, f" to append {tokens} more tokens"
    )


def _check_tensor(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple, device) -> None:
    if not isinstance(x, Tensor) or (x.dtype, tuple(x.shape), x.device) != (dtype, shape, device):
        found = f"{x.dtype} of {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{name} must be {dtype} of shape {shape} on {device} like q, got {found}")


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
    """Output (B, H, T, D) in the dtype of q; advances ``start_block`` in place."""
    cache = PagedKVCache(k, v, c, block_table, seqlens)
    check_threshold(threshold)
    check_values("seq_start", seq_start, 0, math.inf)
    check_values("block_table", block_table, 0, len(k) - 1)
    check_values("seqlens", seqlens, 0, cache.capacity)
    check_values("start_block", start_block, 0, block_table.shape[2])
    options = (threshold, seq_start, sm_scale, window_size)
    return find_backend(implementation).decode(q, cache, start_block, *options)


decode_op = torch.library.custom_op(
    "acp_repro::forgetting_attention_with_kvcache", run_decode, mutates_args=("start_block",)
)


@decode_op.register_fake
def _(q, *_):
    return torch.empty_like(q)
