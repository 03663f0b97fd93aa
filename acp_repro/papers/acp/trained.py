"""A trained Forgetting Transformer, with the held-out text that it is measured on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from acp_repro.data import prepare
from acp_repro.data.sequences import Batches
from acp_repro.model import FoXForCausalLM
from acp_repro.training.task import Trained

from .needle.trial import without_pruning
from .suite import FoXRun, FoXSuite


class TrainedFoX(Trained):
    suite: FoXSuite
    run: FoXRun
    model: FoXForCausalLM

    @property
    def common_length(self) -> int:
        """What every context length of the suite divides: the longest, where the shorter ones divide it."""
        return math.lcm(*(run.context_length for run in self.suite.runs))

    @property
    def rows(self) -> int:
        """Sequences in a batch of the size that training has."""
        return max(1, self.run.training.micro_batch_tokens // self.run.context_length)

    def methods(self) -> Iterator[str]:
        """``acp`` or ``exact``, the run's own; then ``exact`` too, with the same weights, for a run with ACP
        whose exact pair the suite lacks. While ``exact`` is at hand the model prunes nothing."""
        yield "exact" if self.run.log_pruning_tolerance is None else "acp"
        if self.run.log_pruning_tolerance is not None and not self.suite.has_exact_pair(self.run):
            with without_pruning(self.model):
                yield "exact"

    def heldout_batches(self, tokens: int, rows: int, same_text_as: int | None = None) -> Batches:
        """(input_ids, labels) of ``rows`` held-out sequences each, ``tokens`` tokens at most."""
        tokens = max(tokens, self.run.context_length)
        sequences = prepare(self.run.data).sequences("heldout", self.run.context_length)
        return sequences.iter_batches(rows, tokens, same_text_as).to(self.device)
