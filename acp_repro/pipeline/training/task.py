"""The interface between the trainer and a paper: the task of a run, and the trained run for metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...common import files
from ..freshness import done
from ..paper import Suite
from ..run import Run
from .run_folder import TrainingError, check_done

T = TypeVar("T")
Batch = tuple[Tensor, ...]


@dataclass
class Trained:
    """A trained run, loaded for measuring. A paper may define a subclass with data for its metrics."""

    suite: Suite
    run: Run
    task: Task
    model: nn.Module
    device: torch.device
    trained_tokens: int
    _once: dict[str, Any] = field(default_factory=dict, repr=False)
    _kept: list[Callable[[], object]] = field(default_factory=list, repr=False)

    @property
    def measure_settings(self) -> Any:
        """The suite's settings of the metrics."""
        return self.suite.measure_settings

    def once(self, compute: Callable[[Any], T]) -> T:
        """``compute(self)``, which is cached for all metrics of one command."""
        name = f"{compute.__module__}.{compute.__qualname__}"
        if name not in self._once:
            self._once[name] = compute(self)
        return self._once[name]

    def when_written(self, delete: Callable[[], object]) -> None:
        """Registers ``delete``, which removes a metric's partial results once all records are written."""
        self._kept.append(delete)

    def written(self) -> None:
        """Calls the functions of :meth:`when_written`, once all records of the run are written."""
        while self._kept:
            self._kept.pop()()


class Task(ABC):
    """The training task of one run. Each paper defines a subclass; only four methods are abstract.

    Attributes:
        run: the run.
        steps: optimiser steps of the whole run.
        micro_batches: micro-batches per step, divided among the ranks.
        step_tokens: tokens per step (or the paper's unit), for the log and the progress bar.
        context_parallel: number of ranks that share the sequences of a batch; see :meth:`share_sequences`.
        whole_graphs: whether torch.compile can trace a block as one graph.
        trained_type: the class of the finished run, as its metrics receive it.
    """

    steps: int
    micro_batches: int = 1
    step_tokens: int = 1
    context_parallel: int = 1
    whole_graphs: bool = True
    trained_type: type[Trained] = Trained

    def __init__(self, run: Run):
        self.run = run

    @abstractmethod
    def build(self) -> nn.Module:
        """A model with initial weights on the CPU; torch's generator is seeded with the run's seed."""

    @abstractmethod
    def batch(self, index: int) -> Batch:
        """Micro-batch ``index`` of the run, tensors on the CPU, which depend only on the settings and
        ``index``."""

    @abstractmethod
    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """The mean loss of a batch, a float32 scalar; ``model`` may be a wrapper and must be called."""

    def share_sequences(self, model: nn.Module, group: ProcessGroup) -> None:
        """Enables context parallelism, if ``context_parallel`` is above 1: from now on ``batch`` returns this
        rank's shards of sequences, and ``model`` reads shards."""
        raise NotImplementedError

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """The learning rate of step number ``step``, counted from 0."""

    def rates(self, model: nn.Module) -> Mapping[Tensor, float]:
        """Maps each weight with a learning-rate multiplier to this multiplier."""
        return {}

    def before_step(self, model: nn.Module, step: int) -> None:
        """A hook on every rank before step number ``step``, counted from 0; ``model`` is the unwrapped model.

        A task whose model samples random numbers seeds them here from the run's seed and the step, so that a
        resumed run is bitwise identical.
        """
        return None

    def after_step(self, model: nn.Module, step: int) -> None:
        """A hook on every rank after the optimiser's step, for updates other than gradient descent.

        The state that it changes must be in the model's state dict; otherwise it is lost when a run resumes.
        """
        return None

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The submodules that are compiled and sharded separately; blocks of equal shape share one graph."""
        return []

    def watch(self, model: nn.Module, *batch: Tensor) -> dict[str, Any]:
        """Statistics of the model for the log, every few steps. Called on every rank, without gradients.

        ``model`` has the same arguments as the result of :meth:`build`; run it eagerly.
        """
        return {}

    def shown(self, watched: dict[str, Any]) -> str:
        """The statistics of :meth:`watch` as text for the progress bar."""
        return ""

    def speed(self, tokens_per_s: float, device: torch.device, ranks: int, watched: dict) -> dict[str, float]:
        """Values for the log that are derived from the throughput, such as the utilisation of the GPU."""
        return {}

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Facts for ``run.json``: ``parameters``, and ``data``, whose ``hash`` covers text and tokeniser."""
        return {"parameters": sum(p.numel() for p in model.parameters()), "data": {"hash": None}}

    def save(self, model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Writes ``model.safetensors`` and other files of the trained model into ``folder``.

        Args:
            weights: unsharded weights on the CPU, if the weights of ``model`` are sharded.
        """
        tensors = {n: t.detach().cpu().contiguous() for n, t in (weights or model.state_dict()).items()}
        with files.replacing(folder / "model.safetensors") as path:
            save_file(tensors, path, metadata={"format": "pt"})

    def load(self, folder: Path, device: torch.device) -> nn.Module:
        """The model that :meth:`save` wrote."""
        model = self.build()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(device)

    def trained(self, suite: Suite, device: torch.device) -> Trained:
        """The finished run, loaded for measuring."""
        run = self.run
        check_done(run)
        try:
            model = self.load(run.model_folder, device)
        except (OSError, ValueError) as error:
            raise TrainingError(
                f"{run.model_folder} cannot be loaded ({error}); copy the damaged file back, or delete "
                f"{run.folder} and train again with `{run.command}`"
            ) from error
        return self.trained_type(suite, run, self, model, device, done(run)["tokens"])
