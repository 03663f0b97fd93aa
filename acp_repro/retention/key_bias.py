"""Fused attention with a differentiable bias on its keys.

PyTorch's fused attention either accepts no bias or materialises the gradient of the whole attention matrix.
On a GPU, in half precision and up to a maximum length, `key_bias_kernel` avoids both limits. Otherwise the
bias, which depends only on the key, becomes one more entry of every key, and that entry of every query is 1.
This also avoids the matrix, padding needs no mask, and dropout applies to the weights as usual.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .scorer import has_kernels

NAME = "retention_key_bias"
CLOSED = -1000.0  # bias of a padding key; exp(-1000) is 0, and float16 can represent it
_FILLING = 8  # entries that are appended to a head, because kernels need multiples of 8


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """softmax(q k' scale + bias) v, with the signature of transformers.

    Args:
        query, key, value: (B, H, T, D), any floating dtype.
        bias: (B, 1, 1, T) float32.

    Returns:
        (B, T, H, D) in the dtype of ``query``, and None for the weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if has_kernels(query, gradient=True):
        from . import key_bias_kernel

        if key_bias_kernel.takes(query, key, value):
            return key_bias_kernel.attend(query, key, value, bias[:, 0, 0].float(), dropout, scale), None
    # The bias is split into two parts, because one bfloat16 causes an error of 3 % at a bias of -13.
    wanted = bias.transpose(-1, -2) / scale
    high = wanted.to(key.dtype)
    low = (wanted - high.to(wanted.dtype)).to(key.dtype)
    more = nn.functional.pad(torch.cat([high, low], -1), (0, _FILLING - 2))
    ones = nn.functional.pad(query.new_ones(1, 1, 1, 2), (0, _FILLING - 2))
    query = torch.cat([query, ones.expand(*query.shape[:-1], -1)], -1)
    key = torch.cat([key, more.expand(-1, key.shape[1], -1, -1)], -1)
    out = nn.functional.scaled_dot_product_attention(
        query, key, nn.functional.pad(value, (0, _FILLING)), dropout_p=dropout, scale=scale
    )
    return out[..., : value.shape[-1]].transpose(1, 2), None


@contextlib.contextmanager
def use_key_bias(config: Any) -> Iterator[None]:
    """A context in which the blocks of a model with this config use :func:`attention`."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
