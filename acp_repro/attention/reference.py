"""Equations 1 to 3 as written: dense, differentiable by autograd, in any dtype.

This implementation is the oracle for all others. It favours simplicity over speed and uses none of them.
"""

import torch
from torch import Tensor

from .boundary import window_start
from .decay import LOG_FGATE_FLOOR, count_closed_gates, cumulative_log_fgate
from .kvcache import PagedKVCache


def decay_bias(log_fgate: Tensor, seqlen_q: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """D of Equation 1, (B, H, Tq, Tk), for the last Tq positions: the sum of the log gates from key to query,
    ``-inf`` above the diagonal and across a gate of exactly 0."""
    seqlen_k = log_fgate.shape[-1]
    finite = log_fgate.double().masked_fill(log_fgate == float("-inf"), 0.0)
    below_floor = (finite - finite.clamp(min=LOG_FGATE_FLOOR)).cumsum(-1)  # the part that c clamps
    c, below_floor, closed = (
        x[..., seqlen_k - seqlen_q :, None] - x[..., None, :]
        for x in (cumulative_log_fgate(log_fgate), below_floor, count_closed_gates(log_fgate))
    )
    causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=c.device).tril_(seqlen_k - seqlen_q)
    return (c + below_floor).to(dtype).masked_fill(~causal | (closed != 0), float("-inf"))


def kept_entries(boundary: Tensor, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int) -> Tensor:
    """(B, H, Tq, Tk) bool: True for entries whose block is at or right of the boundary."""
    rows = torch.arange(seqlen_q, device=boundary.device) // block_q
    columns = torch.arange(seqlen_k, device=boundary.device) // block_k
    return columns >= boundary[..., rows, None]


def shared_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, Hkv, T, D) repeated to (B, heads, T, D): head h reads ``h // (heads / Hkv)``."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def attention_scores(
    q: Tensor,
    k: Tensor,
    log_fgate: Tensor,
    *,
    seq_start: Tensor | None = None,
    sm_scale: float,
    kept: Tensor | None = None,
    window_size: int | None = None,
) -> Tensor:
    """``S = sm_scale Q K^T + D`` (B, H, Tq, Tk), float32 or float64, with ``-inf`` at every excluded entry.

    ``kept`` (bool, broadcastable to (B, H, Tq, Tk)) is True for entries that are not pruned (Equation 3); the
    other arguments are documented in :class:`.checks.AttentionCall`.
    """
    bias = decay_bias(log_fgate, q.shape[-2], dtype=torch.promote_types(q.dtype, torch.float32))
    scores = (q @ shared_heads(k, q.shape[1]).mT * sm_scale).to(bias.dtype) + bias
    keys = torch.arange(k.shape[-2], device=k.device)
    if seq_start is not None:
        scores = scores.masked_fill(keys < seq_start[:, None, None, None], float("-inf"))
    if kept is not None:
        scores = scores.masked_fill(~kept, float("-inf"))
    if window_size is not None:
        rows = keys[k.shape[-2] - q.shape[-2] :, None]
        scores = scores.masked_fill(keys < window_start(rows, window_size), float("-inf"))
    return scores


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    *,
    seq_start: Tensor | None = None,
    sm_scale: float,
    kept: Tensor | None = None,
    window_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense forgetting attention (Equation 2; with ``kept``, Equation 3 at block level).

    The arguments are those of :func:`attention_scores`, and v, which has the shape of k. The softmax is
    computed in float32, or in float64 for float64 inputs.

    Returns:
        out (B, H, Tq, D) in the dtype of q, and lse (B, H, Tq), the log-sum-exp of each row. A row without
        keys (before ``seq_start``) has out 0 and lse ``-inf``.
    """
    options = {"seq_start": seq_start, "sm_scale": sm_scale, "kept": kept, "window_size": window_size}
    scores = attention_scores(q, k, log_fgate, **options)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights.to(v.dtype) @ shared_heads(v, q.shape[1]), scores.detach().logsumexp(-1)


def pruned_mass(
    q: Tensor, k: Tensor, log_fgate: Tensor, kept: Tensor, *, seq_start: Tensor | None = None, sm_scale: float
) -> Tensor:
    """``sum_j 1{pruned} A_ij`` (B, H, Tq) float64 for the exact weights A, the sum that Appendix A bounds.

    ``kept`` (bool, broadcastable to (B, H, Tq, Tk)) is False for pruned entries; the other arguments are
    those of :func:`attention_scores`.
    """
    scores = attention_scores(q.double(), k.double(), log_fgate, seq_start=seq_start, sm_scale=sm_scale)
    return scores.softmax(-1).nan_to_num(0.0).masked_fill(kept, 0.0).sum(-1)


def decode(q: Tensor, cache: PagedKVCache, start_block, seq_start, sm_scale, window_size=None) -> Tensor:
    """Equation 3 over the keys from ``start_block`` on, one head at a time: (B, H, T, D) like q."""
    out = torch.zeros_like(q)
    size, group = cache.block_size, q.shape[1] // cache.block_table.shape[1]
    for b, length in enumerate(cache.seqlens.tolist()):
        tokens = min(q.shape[2], length)  # earlier queries have no token
        for h in range(q.shape[1] if tokens else 0):
            first = int(start_block[b, h])
            blocks = cache.block_table[b, h // group, first : -(-length // size)].long()
            real = slice(0, length - first * size)
            k, v = (x[blocks].flatten(0, 1)[None, None, real] for x in (cache.k, cache.v))
            c = cache.c[blocks, h % group].flatten()[None, None, real]
            start = None if seq_start is None else (seq_start[b : b + 1] - first * size).clamp(min=0)
            if start is not None:
                padding = torch.arange(k.shape[2], device=k.device) < start
                k, v = (x.masked_fill(padding[:, None], 0.0) for x in (k, v))
                c = c.masked_fill(padding, 0.0)
            one, gates = q[b : b + 1, h : h + 1, -tokens:], c.diff(dim=-1, prepend=c[..., :1])
            options = {"seq_start": start, "sm_scale": sm_scale, "window_size": window_size}
            out[b, h, -tokens:] = forgetting_attention(one, k, v, gates, **options)[0][0, 0]
    return out
