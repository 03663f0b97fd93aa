"""A trained run, loaded for measuring: weights, held-out text, device and dtype."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..data import prepare
from ..model import FoXForCausalLM, load_pretrained
from ..records import processor_name
from ..suite import MeasureConfig, Run
from ..training.loop import TrainingError, is_done
from ..training.run_folder import text_hash

T = TypeVar("T")


def _check_text(run: Run) -> None:
    """Refuses a tokeniser that was trained on other text than the model's: its ids mean other words."""
    if run.weights is not None or not run.data.bpe_size:
        return
    if text_hash(run) not in (None, prepare(run.data).describe()["hash"]):
        raise TrainingError(
            f"{run.folder} was trained on other text than what corpus {run.data.corpus} is now, so with "
            f"another tokeniser. Put the text back, or delete the run and train anew with `{run.command}`"
        )


@dataclass
class TrainedRun:
    run: Run
    measure: MeasureConfig
    model: FoXForCausalLM
    device: torch.device
    trained_tokens: int
    common_length: int | None = None  # what every context length of the suite divides
    _once: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(
        cls, run: Run, measure: MeasureConfig, device: torch.device, common_length: int | None = None
    ) -> TrainedRun:
        """The weights in the run's folder.

        Args:
            common_length: a length that is a multiple of all context lengths that are compared on
                the same text; None takes the run alone.

        Raises:
            TrainingError: the run is not trained, or with other settings; names the command.
        """
        if not is_done(run):
            raise TrainingError(
                f"{run.folder} holds no finished weights of these settings; train them with `{run.command}`"
            )
        _check_text(run)
        model = load_pretrained(run.model_folder).to(device)
        tokens = json.loads((run.folder / "done.json").read_text())["tokens"]
        return cls(run, measure, model, device, tokens, common_length)

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return processor_name()

    def once(self, compute: Callable[[TrainedRun], T]) -> T:
        """``compute(self)``, done once: what several quantities of one command share."""
        name = f"{compute.__module__}.{compute.__qualname__}"
        if name not in self._once:
            self._once[name] = compute(self)
        return self._once[name]

    def heldout_batches(
        self, tokens: int, rows: int, same_text_as: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, labels) of ``rows`` held-out sequences each, ``tokens`` tokens at most."""
        tokens = max(tokens, self.run.context_length)
        sequences = prepare(self.run.data).sequences("heldout", self.run.context_length)
        for batch in sequences.iter_batches(rows, tokens, same_text_as):
            yield tuple(x.to(self.device) for x in batch)
