"""The runs of a suite of Adaptive Retention, and which of them an item is about."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from acp_repro.pipeline.paper import Suite, first_seeds
from acp_repro.pipeline.run import Run
from acp_repro.retention.settings import RetentionConfig

from .settings import (
    ABLATIONS,
    GATES,
    METHODS,
    MLM,
    BackboneConfig,
    DatasetConfig,
    File,
    PretrainingConfig,
    TrainingConfig,
)

PAPER_RELAXATION = (0.66, -0.1, 1.1)  # beta, gamma, zeta of Section 4.2
_GRID_KEYS = ("budget", "method", "gates", "temperature", "stretch", "open_steps", "hard_from_step")


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainingRun(Run):
    """One encoder pre-trained by masked language modelling, for other runs to start from."""

    dataset_name: str
    pretraining: PretrainingConfig
    backbone_name: str
    backbone: BackboneConfig
    training: TrainingConfig
    method = MLM
    budget = 1.0
    gates = "none"
    is_dense = False

    @property
    def name(self) -> str:
        """For example ``books-base-mlm``."""
        words = f"{self.dataset_name}-{self.backbone_name}-{MLM}".lower()
        return words + (f"-seed{self.seed}" if self.seed else "")

    @property
    def setting(self) -> tuple:
        """See ``Run.setting``."""
        return (self.dataset_name, self.backbone_name, MLM)

    def columns(self) -> dict[str, Any]:
        """See ``Run.columns``."""
        return {
            "dataset": self.dataset_name,
            "backbone": self.backbone_name,
            "method": MLM,
            "budget": self.budget,
            "gates": self.gates,
            "temperature": None,
            "stretch_low": None,
            "stretch_high": None,
            "seed": self.seed,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class RetentionRun(Run):
    """One encoder fine-tuned on one task with one method at one budget.

    Attributes:
        start: the run that gives its weights and tokeniser, if the suite has one.
    """

    dataset_name: str
    dataset: DatasetConfig
    backbone_name: str
    backbone: BackboneConfig
    start: PretrainingRun | None
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
        """For example ``sst2-distilbert-ar-30-input``; more words follow if the relaxation is not the
        paper's."""
        words = [self.dataset_name, self.backbone_name, self.method.replace("_", "")]
        if not self.is_dense:
            words += [f"{100 * self.budget:g}", self.gates.replace("_", "")]
            for letter, value, usual in zip("tgz", self.relaxation, PAPER_RELAXATION, strict=True):
                words += [f"{letter}{value:g}"] if value != usual else []
        return "-".join(words).lower() + (f"-seed{self.seed}" if self.seed else "")

    @property
    def is_dense(self) -> bool:
        """Whether the run has no gates."""
        return self.method == "dense"

    @property
    def is_timed_untrained(self) -> bool:
        """Whether fresh weights have the same time and memory; a threshold keeps what it was trained to
        keep."""
        return self.retention_config().selection != "threshold"

    @property
    def relaxation(self) -> tuple[float, float, float]:
        """beta, gamma, zeta of Eq. 6."""
        return self.temperature, self.stretch_low, self.stretch_high

    @property
    def setting(self) -> tuple:
        """See ``Run.setting``."""
        return (self.dataset_name, self.backbone_name, self.method, self.budget, self.gates, self.relaxation)

    def columns(self) -> dict[str, Any]:
        """See ``Run.columns``."""
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

    def as_dict(self) -> dict[str, Any]:
        """Includes its start: a run that starts from other weights is another run."""
        resolved = super().as_dict()
        resolved["dataset"]["reader"] = resolved["dataset"].pop("corpus")  # as the first records name it
        return resolved | {"start": None if self.start is None else self.start.as_dict()}

    def retention_config(self, **changes: Any) -> RetentionConfig:
        """The settings of the gates.

        Raises:
            ValueError: they are not allowed.
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
    file: File, suite: str, where: str, *, dataset: str, backbone: str, method: str, **point: Any
) -> RetentionRun | PretrainingRun:
    """A point of the grid as a run.

    Raises:
        ValueError: the point is not allowed; the message begins with the key.
    """
    of_text = ("dataset", dataset, file.pretraining, "pretraining")
    of_task = ("dataset", dataset, file.datasets, "datasets")
    of_backbone = ("backbone", backbone, file.backbones, "backbones")
    for key, name, known, place in (of_text if method == MLM else of_task, of_backbone):
        if name not in known:
            raise ValueError(f"{where}.{key}: no {name!r} under {place}, which has {', '.join(known)}")
    if method == MLM:
        if file.backbones[backbone].pretrained:
            raise ValueError(f"{where}.backbone: {backbone} has published weights; pre-train fresh ones")
        return _pretraining_run(file, suite, dataset, backbone, point["seed"])
    text = file.backbones[backbone].pretrained_on
    if text is not None and text not in file.pretraining:
        raise ValueError(f"backbones.{backbone}.pretrained_on: no {text!r} under pretraining")
    for key in _GRID_KEYS:
        if key in file.retention:
            raise ValueError(f"retention.{key}: the grid or training sets it; remove it here")
    if (point["gates"] == "none") != (method == "dense"):
        raise ValueError(f"{where}.gates: must be one of {', '.join(GATES)}, got 'none'")
    run = RetentionRun(
        suite=suite,
        training=file.training,
        weights=file.weights,
        dataset_name=dataset,
        dataset=file.datasets[dataset],
        backbone_name=backbone,
        backbone=file.backbones[backbone],
        start=None if text is None else _pretraining_run(file, suite, text, backbone, 0),
        method=method,
        retention=file.retention,
        **point,
    )
    try:
        run.retention_config()
    except ValueError as error:
        raise ValueError(f"{where} with retention: {error}") from None
    return run


def _pretraining_run(file: File, suite: str, text: str, backbone: str, seed: int) -> PretrainingRun:
    pretraining = file.pretraining[text]
    training = dataclasses.replace(
        file.training,
        learning_rate=pretraining.learning_rate,
        warmup_share=pretraining.warmup_share,
        open_share=0.0,
        hard_share=0.0,
        group_by_length=False,  # its sequences are all of one length
    )
    return PretrainingRun(
        suite=suite,
        seed=seed,
        training=training,
        weights=file.weights,
        dataset_name=text,
        pretraining=pretraining,
        backbone_name=backbone,
        backbone=file.backbones[backbone],
    )


class RetentionSuite(Suite):
    """A suite of encoders with gates."""

    runs: tuple[RetentionRun | PretrainingRun, ...]

    @property
    def tuned(self) -> list[RetentionRun]:
        """All runs except pre-training."""
        return [run for run in self.runs if isinstance(run, RetentionRun)]

    @property
    def pretrained(self) -> list[PretrainingRun]:
        """Runs that pre-train an encoder."""
        return [run for run in self.runs if isinstance(run, PretrainingRun)]

    def check(self) -> None:
        """See ``Suite.check``."""
        for run in self.tuned:
            if run.start is not None and run.start not in self.runs:
                entry = (
                    f"dataset: [{run.start.dataset_name}], backbone: [{run.backbone_name}], method: [{MLM}]"
                )
                raise ValueError(
                    f"backbones.{run.backbone_name}.pretrained_on: the grid has no run {run.start.name}; "
                    f"add {{{entry}}}"
                )
        known = {*self.file.datasets, *(run.name for run in self.runs)}
        for name in self.file.timed or ():
            if name not in known:
                raise ValueError(f"timed: {name!r} is neither a name under datasets nor a run; correct it")

    def prerequisites(self, run: Run) -> list[Run]:
        """Its start; for ToP also the dense model of the same task and seed from which it is distilled."""
        if not isinstance(run, RetentionRun):
            return []
        like = (run.dataset_name, run.backbone_name, run.seed)
        teachers = [r for r in self.dense if (r.dataset_name, r.backbone_name, r.seed) == like]
        return ([run.start] if run.start else []) + (teachers[:1] if run.method == "top" else [])

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
        """Tables 1 and 2: every method at this budget and the dense models of the same tasks, all seeds."""
        methods = [name for name in METHODS if name not in ABLATIONS]
        runs = self.select(*methods, budget=budget)
        pruned = {(run.dataset_name, run.backbone_name) for run in runs if not run.is_dense}
        runs = [run for run in runs if (run.dataset_name, run.backbone_name) in pruned]
        return runs if any(run.is_dense for run in runs) else []

    @property
    def dense(self) -> list[RetentionRun]:
        """Runs without gates."""
        return self.select("dense")

    @property
    def adaptive(self) -> list[RetentionRun]:
        """Runs of Adaptive Retention itself, without its ablations."""
        return self.select("ar")

    def ablations(self) -> list[RetentionRun]:
        """Table 3: the ablations, and the full method at the same places and budgets."""
        ablations = self.select(*ABLATIONS)
        like = {(r.dataset_name, r.backbone_name, r.budget, r.gates) for r in ablations}
        return [
            run
            for run in self.select("ar", *ABLATIONS)
            if (run.dataset_name, run.backbone_name, run.budget, run.gates) in like
        ]

    def sweeps(self) -> list[RetentionRun]:
        """Figure 2: the method with several values of temperature or stretch, otherwise equal.

        All seeds, because those of the default tell how much trainings differ.
        """
        runs = self.select("ar", usual=False)
        moved = {self._place(run) for run in runs if run.relaxation != PAPER_RELAXATION}
        return [run for run in runs if self._place(run) in moved]

    @staticmethod
    def _place(run: RetentionRun) -> tuple:
        return run.dataset_name, run.backbone_name, run.budget, run.gates

    def timed(self) -> list[RetentionRun]:
        """One seed of every method, without the sweeps, of the tasks or runs that the file names under
        timed."""
        runs, chosen = first_seeds(self.select(*METHODS)), self.file.timed
        return [run for run in runs if chosen is None or {run.name, run.dataset_name} & set(chosen)]
