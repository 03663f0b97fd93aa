"""A trained pruning autoencoder, with the held-out text that it is measured on."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from acp_repro.lap import PruningAutoencoder
from acp_repro.lap.autoencoder import pad
from acp_repro.pipeline.paper import Suite
from acp_repro.pipeline.training.task import Trained

from .suite import PruningRun


class TrainedPruning(Trained):
    """A trained pruning autoencoder; :attr:`model` is in evaluation mode. See ``Trained``."""

    suite: Suite
    run: PruningRun
    model: PruningAutoencoder

    def heldout_rows(self, most: int) -> list[list[int]]:
        """Token ids, with EOS, of the first held-out texts."""
        return self.task.rows("heldout", most)

    def batches(self, rows: list[list[int]]) -> Iterator[Tensor]:
        """(B, T) int64 on the model's device, in order."""
        size = self.measure_settings.batch_texts
        for start in range(0, len(rows), size):
            yield pad(rows[start : start + size], self.task.tokenizer.pad_id).to(self.device)

    def text(self, row: list[int]) -> str:
        """The text of token ids."""
        return self.task.tokenizer.decode(row)
