"""The runs of the suites of Adaptive Retention, and the selections of runs for each item."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from acp_repro.pipeline.paper import Suite, first_seeds
from acp_repro.pipeline.run import Run
from acp_repro.retention.config import RetentionConfig

from .schema import (
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
RUN_COLUMNS = (
    *("dataset", "backbone", "method", "budget", "gates"),
    *("temperature", "stretch_low", "stretch_high", "seed"),
)
PRETRAINING_WARMUP_SHARE = 0.06
_GRID_KEYS = ("budget", "method", "gates", "temperature", "stretch", "open_steps", "hard_from_step")


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderRun(Run):
    """The base class of pre-training and fine-tuning runs."""

    dataset_name: str
    backbone_name: str
    backbone: BackboneConfig
    training: TrainingConfig

    def columns(self) -> dict[str, Any]:
        own = {name: getattr(self, name, None) for name in RUN_COLUMNS}
        return own | {"dataset": self.dataset_name, "backbone": self.backbone_name}

    def _suffix(self) -> str:
        return f"-seed{self.seed}" if self.seed else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainingRun(EncoderRun):
    """One encoder pre-trained by masked language modelling, whose weights initialise other runs."""

    pretraining: PretrainingConfig
    method = MLM
    budget = 1.0
    gates = "none"
    is_dense = False

    @property
    def name(self) -> str:
        """For example ``books-base-mlm``."""
        return f"{self.dataset_name}-{self.backbone_name}-{MLM}".lower() + self._suffix()

    @property
    def setting(self) -> tuple:
        return (self.dataset_name, self.backbone_name, MLM)


@dataclass(frozen=True, kw_only=True, eq=False)
class RetentionRun(EncoderRun):
    """One encoder fine-tuned on one task with one method at one budget."""

    dataset: DatasetConfig
    start: PretrainingRun | None  # the source of weights and tokenizer
    method: str
    budget: float
    gates: str
    temperature: float
    stretch_low: float
    stretch_high: float
    retention: dict[str, Any]

    @property
    def name(self) -> str:
        """For example ``sst2-distilbert-ar-30-input``, or ``...-input-t0.4`` with another value of Eq. 6."""
        words = [self.dataset_name, self.backbone_name, self.method.replace("_", "")]
        if not self.is_dense:
            words += [f"{100 * self.budget:g}", self.gates.replace("_", "")]
            for letter, value, usual in zip("tgz", self.relaxation, PAPER_RELAXATION, strict=True):
                words += [f"{letter}{value:g}"] if value != usual else []
        return "-".join(words).lower() + self._suffix()

    @property
    def is_dense(self) -> bool:
        return self.method == "dense"

    @property
    def is_timed_untrained(self) -> bool:
        """Whether random weights are equally fast; the keep ratio of a threshold depends on training."""
        return self.retention_config().selection != "threshold"

    @property
    def relaxation(self) -> tuple[float, float, float]:
        """beta, gamma, zeta of Eq. 6."""
        return self.temperature, self.stretch_low, self.stretch_high

    @property
    def place(self) -> tuple:
        """Task, encoder, budget and gates."""
        return self.dataset_name, self.backbone_name, self.budget, self.gates

    @property
    def setting(self) -> tuple:
        return (self.dataset_name, self.backbone_name, self.method, self.budget, self.gates, self.relaxation)

    def retention_config(self, **changes: Any) -> RetentionConfig:
        """The settings of the gates."""
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
    """The run of a point of the grid; raises ValueError that begins with the key."""
    source = "pretraining" if method == MLM else "datasets"
    for key, name, place in (("dataset", dataset, source), ("backbone", backbone, "backbones")):
        known = getattr(file, place)
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
        warmup_share=PRETRAINING_WARMUP_SHARE,
        open_share=0.0,
        hard_share=0.0,
        group_by_length=False,  # all sequences have the same length
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
    runs: tuple[RetentionRun | PretrainingRun, ...]

    @property
    def tuned(self) -> list[RetentionRun]:
        return [run for run in self.runs if isinstance(run, RetentionRun)]

    @property
    def pretrained(self) -> list[PretrainingRun]:
        return [run for run in self.runs if isinstance(run, PretrainingRun)]

    def check(self) -> None:
        for run in self.tuned:
            if run.method == "top" and not any(r.is_dense for r in self.prerequisites(run)):
                raise ValueError(f"grid: {run.name} is distilled from a dense run of its seed; add one")
            start, backbone = run.start, run.backbone_name
            if start is not None and start not in self.runs:
                raise ValueError(
                    f"backbones.{backbone}.pretrained_on: the grid has no run {start.name}; add {{dataset: "
                    f"[{start.dataset_name}], backbone: [{backbone}], method: [{MLM}]}}"
                )
        known = {*self.file.datasets, *(run.name for run in self.runs)}
        for name in self.file.benchmarks or ():
            if name not in known:
                raise ValueError(f"benchmarks: {name!r} is neither a dataset nor a run; correct it")

    def prerequisites(self, run: Run) -> list[Run]:
        """The run's ``start``; for ToP also its teacher, the dense model of the same task and seed."""
        if not isinstance(run, RetentionRun):
            return []
        teachers = [r for r in self.dense if (r.place[:2], r.seed) == (run.place[:2], run.seed)]
        return ([run.start] if run.start else []) + (teachers[:1] if run.method == "top" else [])

    def select(self, *methods: str, budget: float | None = None, usual: bool = True) -> list[RetentionRun]:
        """Runs of these methods, at one budget or at any; ``usual``: only with the paper's relaxation."""
        return [
            run
            for run in self.runs
            if run.method in methods
            and (budget is None or run.is_dense or run.budget == budget)
            and (not usual or run.relaxation == PAPER_RELAXATION)
        ]

    def table_runs(self, budget: float) -> list[RetentionRun]:
        """Tables 1 and 2: every method at this budget and the dense models of the same tasks, all seeds."""
        methods = [name for name in METHODS if name not in ABLATIONS]
        runs = self.select(*methods, budget=budget)
        pruned, dense = ({run.place[:2] for run in runs if run.is_dense is of} for of in (False, True))
        return [run for run in runs if run.place[:2] in pruned & dense]

    @property
    def dense(self) -> list[RetentionRun]:
        return self.select("dense")

    @property
    def adaptive(self) -> list[RetentionRun]:
        """Runs of Adaptive Retention itself, without its ablations."""
        return self.select("ar")

    def ablations(self) -> list[RetentionRun]:
        """Table 3: the ablations, and the full method at the same places and budgets."""
        places = {run.place for run in self.select(*ABLATIONS)}
        return [run for run in self.select("ar", *ABLATIONS) if run.place in places]

    def sweeps(self) -> list[RetentionRun]:
        """Figure 2: the method with several values of temperature or stretch, otherwise equal; all seeds."""
        runs = self.select("ar", usual=False)
        places = {run.place for run in runs if run.relaxation != PAPER_RELAXATION}
        return [run for run in runs if run.place in places]

    def benchmarked(self) -> list[RetentionRun]:
        """One seed of every method, without the sweeps, for the tasks and runs that ``benchmarks`` names."""
        runs, chosen = first_seeds(self.select(*METHODS)), self.file.benchmarks
        return [run for run in runs if chosen is None or {run.name, run.dataset_name} & set(chosen)]
