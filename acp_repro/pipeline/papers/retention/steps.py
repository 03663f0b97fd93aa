"""Functions that fine-tuning and pre-training share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from acp_repro.pipeline.training.distributed import rank

from .settings import TrainingConfig


def linear(config: TrainingConfig, step: int, steps: int) -> float:
    """The learning rate after ``step`` of ``steps``: linear warm-up, then linear to 0."""
    warmup = round(config.warmup_share * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (steps - step) / max(1, steps - warmup)


def seed_step(seed: int, step: int) -> None:
    """Seeds torch's generator, so that dropout and gates depend on seed, step and rank alone."""
    torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank()) % 2**63)


def save_pretrained(model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """``save_pretrained`` into one file; see ``Task.save``."""
    quiet()
    model.save_pretrained(
        folder, state_dict=None if weights is None else dict(weights), max_shard_size="100GB"
    )


def quiet() -> None:
    """Turns off transformers' own progress bars, for files that load fast."""
    from transformers.utils import logging

    logging.disable_progress_bar()
