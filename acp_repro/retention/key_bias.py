"""Fused attention with a bias on its keys that wants a gradient.

PyTorch's fused attention either takes no bias or stores the gradient of a whole matrix of attention. On a
GPU, in half precision and up to some length, `key_bias_kernel` does neither. Elsewhere a bias that depends on
the key alone is a further entry of every key, met by a 1 in every query: then no matrix is there either,
padding needs no mask, and dropout falls on the weights as ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .scorer import has_kernels

NAME = "retention_key_bias"
CLOSED = -1000.0  # of a key that is padding; exp of it is 0, and float16 holds it
_FILLING = 8  # entries of a head that are added: kernels want multiples of 8


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
    """softmax(q k' scale + bias) v, as transformers calls it: (B, T, H, D).

    Args:
        query, key, value: (B, H, T, D).
        bias: (B, 1, 1, T) float32.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if has_kernels(query, gradient=True):
        from . import key_bias_kernel

        if key_bias_kernel.takes(query, key, value):
            return key_bias_kernel.attend(query, key, value, bias[:, 0, 0].float(), dropout, scale), None
    # In two parts, for bfloat16 alone would be 3 % off where the bias is -13.
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
def used_by(config: Any) -> Iterator[None]:
    """Blocks of a model with this config take :func:`attention`, inside."""
    _register()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@functools.cache
def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
