"""Forgetting attention of DTensors: batch rows and heads are independent, so both may be sharded."""

import functools
import importlib
from typing import Any

import torch

from .backends import find_backend


@functools.cache
def register_dtensor_sharding() -> None:
    """Makes the operators of forgetting attention accept ``torch.distributed.tensor.DTensor``.

    :func:`.forgetting_attention`, its backward pass and :func:`.forgetting_attention_with_kvcache` then run
    without communication on DTensors that are sharded along the batch or the heads. Inputs with other
    placements are redistributed first. The number of key heads of grouped queries must be divisible by the
    number of ranks; otherwise heads are replicated.

    Calls with ``seq_start`` or ``adaptive_threshold`` as ordinary tensors or numbers need the context
    ``torch.distributed.tensor.experimental.implicit_replication()``. In a cache, ``block_table``, ``seqlens``
    and ``start_block`` are sharded, and ``k``, ``v`` and ``c`` are replicated. Append new tokens with
    :meth:`PagedKVCache.write` before distributing the cache.

    Importing the package does not register the operators, because importing DTensor is slow.
    """
    register = importlib.import_module("torch.distributed.tensor.experimental").register_sharding
    operators = torch.ops.acp_repro
    register(operators.forgetting_attention.default)(_shard_forward)
    register(operators.forgetting_attention_backward.default)(_shard_backward)
    register(operators.forgetting_attention_with_kvcache.default)(_shard_decoding)


# The leading dimensions of a tensor: rows and heads, only rows, or neither. None is an absent tensor.
_HEADS, _ROWS, _WHOLE = "heads", "rows", "whole"


def _list_shardings(q: Any, k_heads: int, outputs: list, inputs: list) -> list[tuple[list, list]]:
    """The placements of outputs and inputs, each described by its dimensions, that need no communication."""
    tensor = importlib.import_module("torch.distributed.tensor")
    whole, rows, heads = tensor.Replicate(), tensor.Shard(0), tensor.Shard(1)
    choices = [
        {_HEADS: whole, _ROWS: whole, _WHOLE: whole, None: None},
        {_HEADS: rows, _ROWS: rows, _WHOLE: whole, None: None},
    ]
    if q.shape[1] == k_heads or k_heads % q.mesh.size() == 0:  # else a rank lacks keys
        choices.append({_HEADS: heads, _ROWS: whole, _WHOLE: whole, None: None})
    return [([choice[x] for x in outputs], [choice[x] for x in inputs]) for choice in choices]


def _given(x: Any, dimensions: str) -> str | None:
    return None if x is None else dimensions


def _saved(q: Any, implementation: str) -> str:
    """The dimensions of the tensor that a backend saves for its backward pass, which may be empty."""
    return _HEADS if len(find_backend(implementation).saved_shape(q)) > 1 else _WHOLE


def _shard_forward(q, k, v, log_fgate, threshold, seq_start, sm_scale, implementation, *window):
    inputs = [_HEADS] * 4 + [_given(threshold, _HEADS), _given(seq_start, _ROWS)]
    outputs = [_HEADS, _saved(q, implementation), _HEADS, _HEADS]
    return _list_shardings(q, k.shape[1], outputs, inputs + [None] * (2 + len(window)))


def _shard_backward(
    dout, q, k, v, log_fgate, out, saved, c, boundary, seq_start, sm_scale, implementation, *window
):
    inputs = [_HEADS] * 6 + [_saved(q, implementation), _HEADS, _HEADS, _given(seq_start, _ROWS)]
    return _list_shardings(q, k.shape[1], [_HEADS] * 4, inputs + [None] * (2 + len(window)))


def _shard_decoding(
    q, k, v, c, block_table, seqlens, start_block, threshold, seq_start, sm_scale, implementation, *window
):
    inputs = [_HEADS] + [_WHOLE] * 3 + [_HEADS, _ROWS, _HEADS]
    inputs += [_given(threshold, _HEADS), _given(seq_start, _ROWS)]
    return _list_shardings(q, block_table.shape[1], [_HEADS], inputs + [None] * (2 + len(window)))
