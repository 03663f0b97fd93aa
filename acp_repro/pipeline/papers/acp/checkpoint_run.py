"""A checkpoint folder with a text as a suite of one run, so that the measures of runs can measure it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acp_repro.model.loss import IGNORED_LABEL

from .checkpoint_folder import TextCheckpoint
from .settings import MeasureConfig, TrainingConfig
from .trained import TrainedFoX

BATCH_TOKENS = 8192


@dataclass(frozen=True)
class CheckpointRun:
    """The part of a run that measures need. How a checkpoint from elsewhere was trained is not known."""

    name: str
    context_length: int
    log_pruning_tolerance: float | None
    training: TrainingConfig


@dataclass(frozen=True)
class CheckpointSuite:
    runs: tuple[CheckpointRun]
    measure_settings: MeasureConfig

    def has_exact_pair(self, run: CheckpointRun) -> bool:
        return False


class TrainedCheckpoint(TrainedFoX):
    """The input of ``measure`` for quantities that need only a model and its held-out text.

    Args:
        input_ids: see :meth:`TextCheckpoint.input_ids`.
        measure: how much is measured, and of what; its ``..._tokens`` are at most those of ``input_ids``.
    """

    def __init__(
        self, checkpoint: TextCheckpoint, input_ids: Tensor, device: torch.device, measure: MeasureConfig
    ):
        run = CheckpointRun(
            str(checkpoint.folder),
            input_ids.shape[1],
            checkpoint.config.log_pruning_tolerance,
            TrainingConfig(
                dtype=checkpoint.autocast_dtype(device),
                batch_tokens=BATCH_TOKENS,
                micro_batch_tokens=BATCH_TOKENS,
            ),
        )
        suite = CheckpointSuite((run,), measure)
        super().__init__(suite, run, None, checkpoint.load(device), device, trained_tokens=0)
        self.input_ids = input_ids

    def heldout_batches(self, tokens: int, rows: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """(input_ids, labels) of the checkpoint's text, which has one length."""
        length = self.run.context_length
        ids, rows = self.input_ids[: max(1, tokens // length)], rows or max(1, BATCH_TOKENS // length)
        # The token after a sequence's last one is not in input_ids, so that position has no loss.
        labels = ids.roll(-1, 1)
        labels[:, -1] = IGNORED_LABEL
        return [
            (inputs.to(self.device), wanted.to(self.device))
            for inputs, wanted in zip(ids.split(rows), labels.split(rows), strict=True)
        ]
