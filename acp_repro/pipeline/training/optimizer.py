"""AdamW, and the learning-rate schedule (Appendix B)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..run import TrainerConfig


def make_optimizer(
    model: nn.Module, config: TrainerConfig, learning_rate: float, rates: Mapping[Tensor, float] | None = None
) -> torch.optim.AdamW:
    """AdamW, fused. Weight decay applies to matrices only, not to norms and biases.

    Args:
        rates: weights of any shape and dtype, whose learning rate is this multiple of the others'.
    """
    rates = rates or {}
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for parameter in model.parameters():
        decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        groups.setdefault((decay, rates.get(parameter, 1.0)), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay, "rate": rate} for (decay, rate), group in groups.items()],
        betas=(config.beta1, config.beta2),
        fused=True,
    )
    set_learning_rate(optimizer, learning_rate)
    return optimizer


def set_learning_rate(optimizer: torch.optim.AdamW, learning_rate: float) -> None:
    """Sets the learning rate of all weights; each group multiplies it by its own ``rate``."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]


def warmup_and_cosine(before: int, step: int, warmup: int, total: int) -> float:
    """Share of the peak learning rate for a step (Appendix B). All arguments have one unit, such as tokens.

    Linear from 0 over ``warmup``, then a cosine to 0 at ``total``. The step's own tokens count for the
    warm-up, so that the first step changes the weights.

    Args:
        before: tokens before the step.
        step: tokens of the step.
    """
    if before + step <= warmup:
        return (before + step) / warmup
    done = min((before - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * max(done, 0.0)))
