"""An initialisation for masked language modelling: the heads of the first block attend to neighbours.

With random weights an encoder soon learns how frequent words are. It then stays there for thousands of steps,
until attention happens to find the tokens beside a mask (docs/lab-notebook.md). Shape and objective stay
unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from acp_repro.retention.encoders import find_encoder, get_module

_AMPLITUDE = 2.0  # of the waves, in standard deviations of the embeddings
_PEAK = 8.0  # a score at its head's neighbour; elsewhere it is about 0


@torch.no_grad()
def look_at_neighbours(model: nn.Module) -> None:
    """Changes fresh weights: heads 0, 1, 2 ... of the first block attend -1, 1, -2 ... places away.

    Let d be the size of a head. The first d dimensions of the embeddings hold only the position t, as sin(w
    t) and cos(w t) for d / 2 frequencies w. Queries read them unchanged, and keys rotated back by the
    neighbour's distance. So a score is a sum of cos(w (distance - neighbour)).
    """
    encoder, config = find_encoder(model), model.config
    base = getattr(model, model.base_model_prefix, model)
    embedding, size = base.embeddings.position_embeddings, config.hidden_size // config.num_attention_heads
    assert embedding.weight.shape[1] == config.hidden_size and size % 2 == 0
    block = encoder.find_layers(encoder.find_stack(model))[0]
    query, key = get_module(block, encoder.query), get_module(block, encoder.key)
    # Random, but the same for every run: evenly spaced ones agree again at some larger distance.
    frequency = math.pi * torch.rand(size // 2, generator=torch.Generator().manual_seed(0))
    std = config.initializer_range
    angle = torch.arange(len(embedding.weight))[:, None] * frequency
    for each in base.embeddings.children():
        if isinstance(each, nn.Embedding):
            each.weight[:, :size] = 0
    embedding.weight[:, :size] = _AMPLITUDE * std * torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    # The norm after the embeddings divides by the deviation of words and positions, each with ``std``.
    amplitude = _AMPLITUDE / math.sqrt(2)
    gain = math.sqrt(_PEAK * math.sqrt(size) / (size / 2 * amplitude**2))
    for head in range(config.num_attention_heads):
        rows = slice(head * size, (head + 1) * size)
        query.weight[rows, :size] += gain * torch.eye(size)
        distance = (1 if head % 2 else -1) * (1 + head // 2)
        turn = frequency * distance
        key.weight[rows, :size] += gain * torch.block_diag(
            *(torch.tensor([[c, -s], [s, c]]) for c, s in zip(turn.cos(), turn.sin(), strict=True))
        )
