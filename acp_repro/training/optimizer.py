"""AdamW, and a schedule of the learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..chain.run import TrainerConfig


def make_optimizer(model: nn.Module, config: TrainerConfig, learning_rate: float) -> torch.optim.AdamW:
    """AdamW, fused; weight decay on matrices only, so on no norm and no bias."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def stop_updates_unless_finite(optimizer: torch.optim.AdamW, *values: Tensor) -> None:
    """From the first step whose ``values`` hold a NaN or an infinity on, ``optimizer.step`` does nothing.

    The host learns of a NaN a step later. Until then the weights stay what they were when it arose, so
    that it can be looked for. This is the switch by which a gradient scaler skips a step of fused AdamW.

    Args:
        values: scalars on the weights' device, the same on every rank.
    """
    bad = torch.stack([~torch.isfinite(value) for value in values]).any().float()
    before = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = bad if before is None else torch.maximum(before, bad)


def warmup_and_cosine(before: int, step: int, warmup: int, total: int) -> float:
    """Share of the peak learning rate for a step, all in the same unit, such as tokens.

    Linear from 0 over ``warmup``, then a cosine to 0 at ``total``. The step's own tokens count for the
    warm-up, so that the first step moves.

    Args:
        before: tokens before the step.
        step: tokens of the step.
    """
    if before + step <= warmup:
        return (before + step) / warmup
    done = min((before - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * max(done, 0.0)))
