"""A drop-in replacement for the forgetting attention of flash-linear-attention (fla).

    from acp_repro.attention import fla
    fla.use(adaptive_threshold="auto")  # all ForgettingAttention layers and models of fla use this package

fla computes the same equation without pruning; docs/compare.md compares both.
"""

import functools
import importlib
from typing import Any

from torch import Tensor

from . import forgetting_attention


def parallel_forgetting_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    adaptive_threshold: None | float | str | Tensor = None,
) -> Tensor:
    """``fla.ops.forgetting_attn.parallel_forgetting_attn`` with an additional argument for ACP.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bfloat16, float16 or float32.
        k, v: (batch, seqlen_k, kv_heads, head_dim), ``heads`` a multiple of ``kv_heads``.
        g: (batch, seqlen_k, heads), log forget gates, at most 0; converted to float32.
        scale: default ``1 / sqrt(head_dim)``.
        window_size: maximum number of keys that a query sees, its own included; None for all.
        cu_seqlens: (documents + 1,), starts of documents packed into a batch of one.
        adaptive_threshold: None for exact attention, as in fla; see
            :func:`acp_repro.attention.forgetting_attention`.

    Returns:
        (batch, seqlen_q, heads, head_dim) in the dtype of q.

    Raises:
        TypeError, ValueError: as :func:`acp_repro.attention.forgetting_attention`.
    """
    return forgetting_attention(
        q,
        k,
        v,
        g.float(),
        cu_seqlens=cu_seqlens,
        window_size=window_size,
        sm_scale=scale,
        adaptive_threshold=adaptive_threshold,
    )


def use(adaptive_threshold: None | float | str | Tensor = None) -> None:
    """Makes every ``ForgettingAttention`` layer of fla in this process call :func:`parallel_forgetting_attn`.

    Args:
        adaptive_threshold: as in :func:`acp_repro.attention.forgetting_attention`, for all layers. ``"auto"``
            bounds the scores of each call by the norms of its q and k.

    Raises:
        ImportError: fla is not installed.
    """
    call = functools.partial(parallel_forgetting_attn, adaptive_threshold=adaptive_threshold)
    _import_layer().parallel_forgetting_attn = functools.wraps(parallel_forgetting_attn)(call)


def restore() -> None:
    """Undoes :func:`use`."""
    own = importlib.import_module("fla.ops.forgetting_attn").parallel_forgetting_attn
    _import_layer().parallel_forgetting_attn = own


def _import_layer() -> Any:
    try:
        return importlib.import_module("fla.layers.forgetting_attn")
    except ImportError as error:
        raise ImportError(
            f"fla cannot be imported ({error}); run `pip install flash-linear-attention`"
        ) from error
