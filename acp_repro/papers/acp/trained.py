"""A trained Forgetting Transformer, with the held-out text that it is measured on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acp_repro.common.command import progress_bar
from acp_repro.model import FoXForCausalLM
from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.model.loss import IGNORED_LABEL
from acp_repro.pipeline.data import prepare
from acp_repro.pipeline.data.sequences import Batches
from acp_repro.pipeline.training.task import Trained
from acp_repro.pipeline.training.trainer import autocast

from .runs import FoXRun, FoXSuite

LabelledBatches = Iterable[tuple[Tensor, Tensor]]  # input_ids and labels, (B, T) int64


class PassSettings(NamedTuple):
    """How a model reads text: the compute dtype, and the name shown in the progress bar."""

    dtype: str
    name: str


class TrainedFoX(Trained):
    suite: FoXSuite
    run: FoXRun
    model: FoXForCausalLM

    def methods(self, both: bool = False) -> Iterator[str]:
        """Yields the run's own method, ``acp`` or ``exact``, with the model set accordingly. If the run has
        ACP and either the suite has no exact pair or ``both`` is set, then yields ``exact`` with the same
        weights.
        """
        own = self.run.log_pruning_tolerance
        yield "exact" if own is None else "acp"
        if own is not None and (both or not self.suite.has_exact_pair(self.run)):
            self.model.set_log_pruning_tolerance(None)
            try:
                yield "exact"
            finally:
                self.model.set_log_pruning_tolerance(own)

    def heldout_batches(
        self, tokens: int, rows: int | None = None, same_text_as: int | None = None
    ) -> Batches:
        """(input_ids, labels) of held-out sequences: at most ``tokens`` tokens, but at least one sequence.

        ``rows`` is the batch size (default: a micro-batch of training). ``same_text_as`` is a multiple of the
        context lengths of several runs, which then all read the same whole pieces of this length.
        """
        length = self.run.context_length
        piece = same_text_as or length
        tokens = max(1, tokens // piece) * piece
        sequences = prepare(self.run.data).sequences("heldout", length)
        rows = rows or max(1, self.run.training.micro_batch_tokens // length)
        return sequences.iter_batches(rows, tokens, same_text_as).to(self.device)

    @property
    def settings(self) -> PassSettings:
        """The dtype and name with which the run reads held-out text."""
        return PassSettings(self.run.training.dtype, self.run.name)

    def on_heldout(
        self, measure: Callable[..., list[dict[str, Any]]], tokens: str, rows: int | None = None
    ) -> list[dict[str, Any]]:
        """The records of ``measure(model, batches, settings)`` on held-out text of the run. ``tokens`` names
        the key under ``measure`` of the suite file that sets the number of tokens."""
        tokens = getattr(self.measure_settings, tokens)
        return measure(self.model, self.heldout_batches(tokens, rows), self.settings)


def read_losses(
    model: FoXForCausalLM, batches: LabelledBatches, settings: PassSettings, what: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """The loss (B, T) float32 in nats of every label, and the labels (B, T) int64, of each batch."""
    for input_ids, labels in progress_bar(batches, desc=f"{settings.name}: {what}", unit="batch"):
        with torch.no_grad(), autocast(input_ids.device, settings.dtype):
            loss = model.loss_per_token(input_ids, labels)
        yield loss, labels


def one_pass(
    model: FoXForCausalLM,
    batches: LabelledBatches,
    settings: PassSettings,
    see: Callable[[int, AttentionInputs], None],
    what: str,
) -> tuple[float, int]:
    """Runs the model on text and returns the mean loss of the labels in nats and the number of tokens.
    ``see(layer, inputs)`` is called before every attention."""
    total, labelled, tokens = 0.0, 0, 0
    with watch_attention(model, see):
        for loss, labels in read_losses(model, batches, settings, what):
            total += loss.double().sum().item()
            labelled += (labels != IGNORED_LABEL).sum().item()
            tokens += labels.numel()
    return total / labelled, tokens
