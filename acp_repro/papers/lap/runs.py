"""The runs and suites of LAP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from acp_repro.lap.config import PruningConfig
from acp_repro.pipeline.paper import Suite
from acp_repro.pipeline.run import Run

from .schema import File, ModelConfig, PruningSettings, TextsConfig, TrainingConfig

ALWAYS_OPEN = 1e6  # a bias that opens every gate for every token
RUN_COLUMNS = ("compression", "gate", "training_mask", "seed")
SHORT = {"soft": "soft", "straight_through": "straight", "hard_concrete": "exact"}


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningRun(Run):
    """One training run of a pruning autoencoder."""

    compression: float | None
    gate: str
    training_mask: str
    training: TrainingConfig
    data: TextsConfig
    model: ModelConfig
    pruning: PruningSettings
    start: PruningRun | None = None  # the run whose weights initialise this run

    @property
    def name(self) -> str:
        """For example ``exact-1.5`` or ``soft-article-3``; ``ungated`` without gates; with the suffix
        ``-seed7`` for another seed."""
        gate = "-article" if self.gate == "article" else ""
        seed = "" if self.seed == 42 else f"-seed{self.seed}"
        if self.compression is None:
            return f"ungated{seed}"
        return f"{SHORT[self.training_mask]}{gate}-{self.compression:g}{seed}"

    @property
    def setting(self) -> tuple:
        return self.compression, self.gate, self.training_mask

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RUN_COLUMNS}

    def pruning_config(self) -> PruningConfig:
        """The settings of the run's model."""
        if self.compression is None:
            return replace(self.pruning.config("published", "soft"), beta=ALWAYS_OPEN, tau=1.0, noise="none")
        return self.pruning.config(self.gate, self.training_mask)


def make_run(
    file: File, suite: str, where: str, *, compression: float | None, gate: str, training_mask: str, seed: int
) -> PruningRun:
    """The run of a point of the grid."""
    start, training = None, file.training
    if compression is None:  # one run for all values of the other axes
        gate, training_mask = "published", "soft"
        training = training if file.start is None else file.start.training(training)
    elif file.start is not None:
        start = make_run(file, suite, where, compression=None, gate="", training_mask="", seed=seed)
    return PruningRun(
        suite=suite,
        seed=seed,
        training=training,
        weights=file.weights,
        compression=compression,
        gate=gate,
        training_mask=training_mask,
        data=file.data,
        model=file.model,
        pruning=file.pruning,
        start=start,
    )


class PruningSuite(Suite):
    """A suite of pruning autoencoders."""

    runs: tuple[PruningRun, ...]

    def check(self) -> None:
        self.chosen_run("main_run")
        for run in self.gated:
            if run.start is not None and run.start.name not in (other.name for other in self.runs):
                raise ValueError(f"start: the grid has no run {run.start.name}; add {{compression: [null]}}")

    def prerequisites(self, run: Run) -> list[Run]:
        return [] if run.start is None else [self.run(run.start.name)]

    @property
    def main_run(self) -> PruningRun:
        """The run for metrics of a single model."""
        usual = next((run for run in self.gated if run.training_mask == "hard_concrete"), self.runs[0])
        return self.chosen_run("main_run") or usual

    @property
    def gated(self) -> list[PruningRun]:
        return [run for run in self.runs if run.compression is not None]

    @property
    def probed(self) -> list[PruningRun]:
        """The main run, if its texts have labels."""
        return [self.main_run] if self.file.data.sides else []
