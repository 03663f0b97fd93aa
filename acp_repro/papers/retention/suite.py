"""The runs of a suite of Adaptive Retention, and which of them an item is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from acp_repro.chain.paper import Suite, first_seeds
from acp_repro.chain.run import Run
from acp_repro.retention.settings import RetentionConfig

from .settings import ABLATIONS, GATES, METHODS, BackboneConfig, DatasetConfig, File, TrainingConfig

PAPER_RELAXATION = (0.66, -0.1, 1.1)  # beta, gamma, zeta of Section 4.2
_GRID_KEYS = ("budget", "method", "gates", "temperature", "stretch", "open_steps", "hard_from_step")


@dataclass(frozen=True, kw_only=True, eq=False)
class RetentionRun(Run):
    """One encoder fine-tuned on one task with one method at one budget."""

    dataset_name: str
    dataset: DatasetConfig
    backbone_name: str
    backbone: BackboneConfig
    method: str
    budget: float
    gates: str
    temperature: float
    stretch_low: float
    stretch_high: float
    retention: dict[str, Any]
    training: TrainingConfig

    @property
    def name(self) -> str:
        """E.g. ``sst2-distilbert-ar-30-input``; further words where the relaxation is not the paper's."""
        words = [self.dataset_name, self.backbone_name, self.method.replace("_", "")]
        if not self.is_dense:
            words += [f"{100 * self.budget:g}", self.gates.replace("_", "")]
            for letter, value, usual in zip("tgz", self.relaxation, PAPER_RELAXATION, strict=True):
                words += [f"{letter}{value:g}"] if value != usual else []
        return "-".join(words).lower() + (f"-seed{self.seed}" if self.seed else "")

    @property
    def is_dense(self) -> bool:
        return self.method == "dense"

    @property
    def relaxation(self) -> tuple[float, float, float]:
        """beta, gamma, zeta of Eq. 6."""
        return self.temperature, self.stretch_low, self.stretch_high

    @property
    def setting(self) -> tuple:
        return (self.dataset_name, self.backbone_name, self.method, self.budget, self.gates, self.relaxation)

    def columns(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset_name,
            "backbone": self.backbone_name,
            "method": self.method,
            "budget": self.budget,
            "gates": self.gates,
            "temperature": self.temperature,
            "stretch_low": self.stretch_low,
            "stretch_high": self.stretch_high,
            "seed": self.seed,
        }

    def retention_config(self, **changes: Any) -> RetentionConfig:
        """The settings of the gates.

        Raises:
            ValueError: they cannot be.
        """
        values = {
            **self.retention,
            "budget": self.budget,
            "gates": self.gates if self.gates != "none" else "after_blocks",
            "temperature": self.temperature,
            "stretch": (self.stretch_low, self.stretch_high),
            **METHODS[self.method],
        }
        return RetentionConfig.from_dict(values | changes)


def make_run(
    file: File, suite: str, where: str, *, dataset: str, backbone: str, **point: Any
) -> RetentionRun:
    """A point of the grid as a run.

    Raises:
        ValueError: the point cannot be; begins with the key.
    """
    for key, name, known in (("dataset", dataset, file.datasets), ("backbone", backbone, file.backbones)):
        if name not in known:
            raise ValueError(f"{where}.{key}: no {name!r} under {key}s, which has {', '.join(known)}")
    for key in _GRID_KEYS:
        if key in file.retention:
            raise ValueError(f"retention.{key}: the grid or training says it; take it out here")
    if (point["gates"] == "none") != (point["method"] == "dense"):
        raise ValueError(f"{where}.gates: must be one of {', '.join(GATES)}, got 'none'")
    run = RetentionRun(
        suite=suite,
        training=file.training,
        weights=file.weights,
        dataset_name=dataset,
        dataset=file.datasets[dataset],
        backbone_name=backbone,
        backbone=file.backbones[backbone],
        retention=file.retention,
        **point,
    )
    try:
        run.retention_config()
    except ValueError as error:
        raise ValueError(f"{where} with retention: {error}") from None
    batch, micro = run.dataset.batch_examples, run.training.micro_batch_examples
    if micro is not None and batch % micro:
        raise ValueError(f"training.micro_batch_examples: {micro} must divide batch_examples {batch}")
    return run


class RetentionSuite(Suite):
    """A suite of encoders with gates."""

    runs: tuple[RetentionRun, ...]

    def select(self, *methods: str, budget: float | None = None, usual: bool = True) -> list[RetentionRun]:
        """Runs of these methods, at one budget or at any.

        Args:
            usual: only those whose relaxation is the paper's.
        """
        return [
            run
            for run in self.runs
            if run.method in methods
            and (budget is None or run.is_dense or run.budget == budget)
            and (not usual or run.relaxation == PAPER_RELAXATION)
        ]

    def of_table(self, budget: float) -> list[RetentionRun]:
        """Tables 1 and 2: the dense models, and every method at this budget, all seeds."""
        methods = [name for name in METHODS if name not in ABLATIONS]
        runs = self.select(*methods, budget=budget)
        return runs if any(not run.is_dense for run in runs) and any(run.is_dense for run in runs) else []

    @property
    def dense(self) -> list[RetentionRun]:
        return self.select("dense")

    @property
    def adaptive(self) -> list[RetentionRun]:
        return self.select("ar")

    def ablations(self) -> list[RetentionRun]:
        """Table 3: the ablations, and the full method at their places and budgets."""
        ablations = self.select(*ABLATIONS)
        like = {(r.dataset_name, r.backbone_name, r.budget, r.gates) for r in ablations}
        return [
            run
            for run in self.select("ar", *ABLATIONS)
            if (run.dataset_name, run.backbone_name, run.budget, run.gates) in like
        ]

    def sweeps(self) -> list[RetentionRun]:
        """Figure 2: the method with several values of temperature or stretch, all else equal."""
        runs = self.select("ar", usual=False)
        moved = {self._place(run) for run in runs if run.relaxation != PAPER_RELAXATION}
        return first_seeds([run for run in runs if self._place(run) in moved])

    @staticmethod
    def _place(run: RetentionRun) -> tuple:
        return run.dataset_name, run.backbone_name, run.budget, run.gates

    def timed(self) -> list[RetentionRun]:
        """One seed of every method, but for the sweeps."""
        return first_seeds(self.select(*METHODS))
