"""The blocks of transformers' T5, run on PyTorch's fused attention.

With transformers' own blocks, a training step of Flan-T5-small's shape is 5,000 operators of a few
microseconds. The host cannot start them as fast as a GPU ends them. Weights and names stay transformers'.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def heads(attention: nn.Module, projected: Tensor) -> Tensor:
    """(B, T, H * d) -> (B, H, T, d), same dtype."""
    return projected.unflatten(-1, (attention.n_heads, attention.key_value_proj_dim)).transpose(1, 2)


def attend(attention: nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """T5's attention, which does not scale its scores.

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


def self_attention(layer: nn.Module, hidden: Tensor, bias: Tensor) -> Tensor:
    """A ``T5LayerSelfAttention`` on whole texts: (B, T, D) -> the same shape and dtype."""
    attention, normed = layer.SelfAttention, layer.layer_norm(hidden)
    keys, values = heads(attention, attention.k(normed)), heads(attention, attention.v(normed))
    return hidden + layer.dropout(attend(attention, normed, keys, values, bias))


def cross_attention(layer: nn.Module, hidden: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
    """A ``T5LayerCrossAttention`` on whole texts: (B, T, D), and memory (B, M, D) -> (B, T, D), same
    dtype."""
    attention = layer.EncDecAttention
    keys, values = heads(attention, attention.k(memory)), heads(attention, attention.v(memory))
    return hidden + layer.dropout(attend(attention, layer.layer_norm(hidden), keys, values, bias))


def encoder_block(block: nn.Module, hidden: Tensor, bias: Tensor) -> Tensor:
    """A ``T5Block`` of an encoder: (B, T, D) -> (B, T, D).

    Args:
        hidden: (B, T, D), any floating dtype.
        bias: see :func:`attend`.
    """
    return block.layer[1](self_attention(block.layer[0], hidden, bias))


def decoder_block(
    block: nn.Module, hidden: Tensor, bias: Tensor, memory: Tensor, memory_bias: Tensor
) -> Tensor:
    """A ``T5Block`` of a decoder on whole texts: (B, T, D) -> (B, T, D).

    Args:
        hidden: (B, T, D), any floating dtype.
        memory: (B, M, D).
        bias, memory_bias: of both attentions; see :func:`attend`.
    """
    hidden = self_attention(block.layer[0], hidden, bias)
    return block.layer[2](cross_attention(block.layer[1], hidden, memory, memory_bias))
