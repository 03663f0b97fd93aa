"""The blocks of transformers' T5 with PyTorch's fused attention, norm and activation.

With transformers' own blocks, a training step at Flan-T5-small's shape runs 5,000 operators of a few
microseconds each, and the host cannot launch them as fast as a GPU finishes them. Weights and their names are
those of transformers.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T5: TypeAlias = Any  # a module of transformers' T5, which has no static types
Remember: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def heads(attention: T5, projected: Tensor) -> Tensor:
    """(B, T, H * d) -> (B, H, T, d), same dtype."""
    return projected.unflatten(-1, (attention.n_heads, attention.key_value_proj_dim)).transpose(1, 2)


def keys_and_values(attention: T5, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, D) -> two of (B, H, T, d), same dtype."""
    return heads(attention, attention.k(hidden)), heads(attention, attention.v(hidden))


def attend(attention: T5, hidden: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """T5's attention with unscaled scores.

    Args:
        attention: a ``T5Attention``.
        hidden: (B, Q, D), normed, any floating dtype.
        keys, values: (B, H, K, d).
        bias: added to the scores; broadcastable to (B, H, Q, K).

    Returns:
        (B, Q, D) in the dtype of the product.
    """
    query = heads(attention, attention.q(hidden))
    dropout = attention.dropout if attention.training else 0.0
    mixed = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=bias.to(query.dtype), dropout_p=dropout, scale=1.0
    )
    return attention.o(mixed.transpose(1, 2).flatten(2))


def self_attention(layer: T5, hidden: Tensor, bias: Tensor, remember: Remember | None = None) -> Tensor:
    """A ``T5LayerSelfAttention`` with its norm and residual: (B, T, D), any floating dtype -> the same.

    Args:
        remember: prepends the cached keys and values of earlier tokens to those of ``hidden``.
    """
    attention, normed = layer.SelfAttention, layer.layer_norm(hidden)
    keys, values = keys_and_values(attention, normed)
    if remember is not None:
        keys, values = remember(keys, values)
    return hidden + layer.dropout(attend(attention, normed, keys, values, bias))


def encoder_block(block: T5, hidden: Tensor, bias: Tensor) -> Tensor:
    """A ``T5Block`` of an encoder: (B, T, D), any floating dtype -> the same; ``bias`` of :func:`attend`."""
    return block.layer[1](self_attention(block.layer[0], hidden, bias))


def decoder_block(
    block: T5,
    hidden: Tensor,
    bias: Tensor,
    memory: tuple[Tensor, Tensor],
    memory_bias: Tensor,
    remember: Remember | None = None,
) -> Tensor:
    """A ``T5Block`` of a decoder: (B, T, D), any floating dtype -> the same.

    Args:
        memory: keys and values of the memory, (B, H, M, d) each.
        bias, memory_bias: bias of self-attention and of cross-attention; see :func:`attend`.
        remember: see :func:`self_attention`.
    """
    hidden = self_attention(block.layer[0], hidden, bias, remember)
    layer = block.layer[1]
    mixed = attend(layer.EncDecAttention, layer.layer_norm(hidden), *memory, memory_bias)
    return block.layer[2](hidden + layer.dropout(mixed))


class FusedNorm(nn.Module):
    """``T5LayerNorm``: x / sqrt(mean(x^2) + eps) * weight.

    The norm is computed in float32 and returned in the dtype of the weight or of autocast.

    Args:
        norm: the norm whose weight this module reuses, under the same name.
    """

    def __init__(self, norm: T5):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D), any floating dtype -> the same shape."""
        weight, dtype = self.weight.float(), self.weight.dtype
        if torch.is_autocast_enabled(hidden.device.type):  # one cast here instead of one in each product
            dtype = torch.get_autocast_dtype(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).to(dtype)


def fuse_norms(t5: T5) -> None:
    """Replaces the norms and tanh-form GELUs of ``t5``, in place, and keeps the names and weights."""
    for module in list(t5.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "T5LayerNorm":
                setattr(module, name, FusedNorm(child))
            elif type(child).__name__ == "NewGELUActivation":
                setattr(module, name, nn.GELU(approximate="tanh"))
