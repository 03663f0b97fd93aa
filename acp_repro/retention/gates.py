"""The Hard-Concrete gate of Eq. 6 (Louizos et al. 2018), and the quantity that the budget's penalty
counts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .settings import RetentionConfig

_EDGE = 1e-6  # u stays this far from 0 and 1, where its log-odds are infinite


def hard_concrete(logits: Tensor, u: Tensor, temperature: float, stretch: tuple[float, float]) -> Tensor:
    """z of Eq. 6 in [0, 1]: clamp(sigmoid((s + log u - log(1 - u)) / beta) (zeta - gamma) + gamma).

    Args:
        logits: s = log alpha, any shape, float.
        u: uniform noise in (0, 1), of the same shape.
        temperature: beta.
        stretch: (gamma, zeta).

    Returns:
        z in the shape and dtype of ``logits``.
    """
    low, high = stretch
    u = u.clamp(_EDGE, 1 - _EDGE)
    noise = torch.log(u) - torch.log1p(-u)
    return (torch.sigmoid((logits + noise) / temperature) * (high - low) + low).clamp(0, 1)


def open_logits(logits: Tensor, temperature: float, stretch: tuple[float, float]) -> Tensor:
    """Log-odds of z > 0: s - beta log(-gamma / zeta), in the shape and dtype of ``logits``."""
    low, high = stretch
    return logits - temperature * math.log(-low / high)


def sample(config: RetentionConfig, logits: Tensor) -> Tensor:
    """A soft z in [0, 1] for each score, as in training: the shape and dtype of ``logits``."""
    if config.relaxation == "sigmoid":
        return torch.sigmoid(logits)
    return hard_concrete(logits, torch.rand_like(logits), config.temperature, config.stretch)


def counted(config: RetentionConfig, logits: Tensor) -> Tensor:
    """How much a token counts in the budget: p = sigmoid(s) of Eq. 5, or P(z > 0); same shape and dtype."""
    if config.penalty == "expected_l0" and config.relaxation == "hard_concrete":
        logits = open_logits(logits, config.temperature, config.stretch)
    return torch.sigmoid(logits)
