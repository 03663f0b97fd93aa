"""An initialisation for masked language modelling: the heads of the first block attend to neighbours.

With random weights an encoder soon learns how frequent words are. It then stays there for thousands of steps,
until attention happens to find the tokens beside a mask (docs/lab-notebook.md). Shape and objective stay
unchanged.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from acp_repro.pipeline.training.run_folder import TrainingError
from acp_repro.retention.encoders import find_encoder

_AMPLITUDE = 2.0  # of the waves, in standard deviations of the embeddings
_PEAK = 8.0  # a score at its head's neighbour; elsewhere it is about 0


@torch.no_grad()
def look_at_neighbours(model: nn.Module) -> None:
    """Changes an encoder's fresh weights, in place. Head h of the first block then attends to the token at
    ``neighbour(h)`` places from its own.

    Let d be the size of a head. The first d dimensions of the embeddings hold only the position t, as sin(w
    t) and cos(w t) for d / 2 frequencies w. Queries read them unchanged, and keys rotated back by the
    neighbour's distance. So a score is a sum of cos(w (distance - neighbour)).

    Args:
        model: of transformers, with an even size of heads and one position embedding a token.

    Raises:
        TrainingError: the model has no position embeddings of its own width.
    """
    encoder, config = find_encoder(model), model.config
    base = getattr(model, model.base_model_prefix, model)
    embedding = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    size = config.hidden_size // config.num_attention_heads
    if embedding is None or embedding.weight.shape[1] != config.hidden_size or size % 2:
        raise TrainingError(
            f"neighbour_heads: {config.model_type} has no position embeddings of hidden_size "
            f"{config.hidden_size} with heads of even size; leave it out"
        )
    block = encoder.find_layers(encoder.find_stack(model))[0]
    query, key = (functools.reduce(getattr, path.split("."), block) for path in (encoder.query, encoder.key))
    # Random, but the same for every run: evenly spaced ones agree again at some larger distance.
    frequency = math.pi * torch.rand(size // 2, generator=torch.Generator().manual_seed(0))
    std = config.initializer_range
    angle = torch.arange(len(embedding.weight))[:, None] * frequency
    for each in base.embeddings.children():
        if isinstance(each, nn.Embedding):
            each.weight[:, :size] = 0
    embedding.weight[:, :size] = _AMPLITUDE * std * _pairs(angle.sin(), angle.cos())
    # The norm after the embeddings divides by the deviation of words and positions, each with ``std``.
    amplitude = _AMPLITUDE / math.sqrt(2)
    gain = math.sqrt(_PEAK * math.sqrt(size) / (size / 2 * amplitude**2))
    for head in range(config.num_attention_heads):
        rows = slice(head * size, (head + 1) * size)
        query.weight[rows, :size] += gain * torch.eye(size)
        turn = frequency * neighbour(head)
        key.weight[rows, :size] += gain * torch.block_diag(
            *(torch.tensor([[c, -s], [s, c]]) for c, s in zip(turn.cos(), turn.sin(), strict=True))
        )


def neighbour(head: int) -> int:
    """-1, 1, -2, 2, -3 ... places from a token."""
    return (1 if head % 2 else -1) * (1 + head // 2)


def _pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """(T, n), (T, n) -> (T, 2 n) of the same dtype, with alternating columns."""
    return torch.stack([first, second], -1).flatten(1)
