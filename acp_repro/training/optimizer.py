"""AdamW and the learning-rate schedule of Appendix B."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..suite import TrainingConfig


def make_optimizer(model: nn.Module, config: TrainingConfig, learning_rate: float) -> torch.optim.AdamW:
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


def learning_rate_factor(tokens_before: int, total_tokens: int, config: TrainingConfig) -> float:
    """Share of the peak learning rate for the step that starts after ``tokens_before`` tokens.

    Linear from 0 over ``warmup_tokens``, then a cosine to 0 at the last token (Appendix B). The step's
    own tokens count for the warm-up, so that the first step moves.
    """
    tokens = tokens_before + config.batch_tokens
    if tokens <= config.warmup_tokens:
        return tokens / config.warmup_tokens
    span = max(total_tokens - config.warmup_tokens, 1)
    done = min((tokens_before - config.warmup_tokens) / span, 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * max(done, 0.0)))
