"""``forgetting_attention`` as an attention implementation of transformers, for other decoders."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from acp_repro.attention import forgetting_attention


def alibi_log_fgate(module: nn.Module, query: Tensor, key: Tensor) -> Tensor:
    """The log gates of ALiBi, (B, H, Tk) float32: ``-2^(-8 h / H)`` for head h of 1 to H, at every key."""
    batch, heads = query.shape[:2]
    exponent = torch.arange(1, heads + 1, dtype=torch.float32, device=query.device) * (-8 / heads)
    return -exponent.exp2()[:, None].expand(batch, heads, key.shape[2])


def register_attention(
    name: str = "forgetting_attention",
    *,
    log_fgate: Callable[[nn.Module, Tensor, Tensor], Tensor] = alibi_log_fgate,
    log_pruning_tolerance: float | None = None,
    logit_bound: float | None = None,
    implementation: str = "auto",
) -> None:
    """Registers :func:`.forgetting_attention` with transformers, for ``attn_implementation=name``.

    Every causal decoder of transformers that calls ``AttentionInterface`` then runs on the kernels of this
    library, including grouped queries, dynamic caches, left or right padding, sliding windows and packed
    documents (``cu_seq_lens_q``, or ``position_ids`` that restart in a batch of one). A later call with the
    same name replaces the entry.

    Args:
        log_fgate: returns the log gates (B, H, Tk) float32 of an attention module, its queries (B, H, Tq, D)
            and its keys (B, Hkv, Tk, D). The default is ALiBi.
        log_pruning_tolerance, logit_bound, implementation: as in :func:`.forgetting_attention`.

    A registered model raises ValueError for features that forgetting attention does not support: masks other
    than padding, bidirectional attention, dropout, soft caps, sinks, and caches with room for later tokens.
    """
    options = {
        "log_pruning_tolerance": log_pruning_tolerance,
        "logit_bound": logit_bound,
        "implementation": implementation,
    }
    AttentionInterface.register(name, functools.partial(_attend, find_gates=log_fgate, options=options))
    AttentionMaskInterface.register(name, _find_padding)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    *,
    find_gates: Callable,
    options: dict[str, Any],
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The output (B, Tq, H, D) of an attention module, in the signature of ``AttentionInterface``."""
    causal = keywords.pop("is_causal", None)
    refused = [name for name in ("dropout", "softcap", "s_aux", "position_bias") if keywords.get(name)]
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        refused.append("is_causal=False")
    if attention_mask is not None and attention_mask.dim() != 2:
        refused.append(f"attention_mask of shape {tuple(attention_mask.shape)}")
    if refused:
        raise ValueError(f"forgetting attention does not support {', '.join(refused)}; remove the setting")
    documents = cu_seq_lens_q
    if documents is None and attention_mask is None and query.shape[2] == key.shape[2]:
        documents = _find_restarts(position_ids)
    out: Any = forgetting_attention(
        query,
        key,
        value,
        find_gates(module, query, key),
        head_first=True,
        seq_start=None if attention_mask is None else attention_mask.int().argmax(-1),
        cu_seqlens=documents,
        window_size=sliding_window,
        sm_scale=scaling,
        **options,
    )
    return out.transpose(1, 2), None


def _find_restarts(position_ids: Tensor | None) -> Tensor | None:
    """The starts of packed documents, (documents + 1,) int64, or None if positions never restart."""
    if position_ids is None or position_ids.dim() != 2:
        return None
    starts = (position_ids[0].diff() != 1).nonzero()[:, 0] + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=position_ids.shape[1]) if len(starts) else None


def _find_padding(
    q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **keywords: Any
) -> Any:
    """The mask (B, Tk) of padding that :func:`_attend` reads, or None without padding."""
    if int(q_offset) + q_length != int(kv_offset) + kv_length:
        raise ValueError(
            f"forgetting attention needs queries at the last of {kv_length} keys; use a cache without room "
            "for later tokens, such as DynamicCache"
        )
    mask = flash_attention_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, **keywords
    )
    if mask is not None and bool(((mask[:, 1:] != mask[:, :-1]).sum(-1) > 1 + ~mask[:, 0]).any()):
        raise ValueError("attention_mask has zeros between ones; only the ends of a row may be padding")
    return mask
