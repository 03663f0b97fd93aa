"""A suite: one YAML file that says at what scale the whole paper is run (``experiments/NAME.yaml``).

The file says only what differs from the paper's settings, which are the defaults below. It is loaded
strictly: an unknown key, a wrong type or an impossible value is one line with file, key and the fix.
The grid is multiplied out here, so a run with ACP and its exact twin differ in one key.

Nothing in this module needs torch: Make asks it for the list of runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .data.config import DataConfig
from .model.config import FoXConfig
from .strict_yaml import SuiteError, load_as

EXPERIMENTS = Path("experiments")


@dataclass(frozen=True)
class SizeConfig:
    """One row of Table 2: a model size with its token budget."""

    num_hidden_layers: int
    hidden_size: int
    tokens: int
    learning_rate: float
    head_dim: int = 64

    def __post_init__(self):
        _positive(self, "num_hidden_layers", "hidden_size", "tokens", "learning_rate", "head_dim")
        if self.hidden_size % self.head_dim:
            raise ValueError(
                f"hidden_size: {self.hidden_size} must be a multiple of head_dim {self.head_dim}"
            )

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def non_embedding(self) -> int:
        """About the number of weights of the blocks, to order sizes by."""
        return 12 * self.num_hidden_layers * self.hidden_size**2


@dataclass(frozen=True)
class TrainingConfig:
    """Appendix B; the defaults are the paper's."""

    batch_tokens: int = 2**19
    micro_batch_tokens: int = 2**15
    warmup_tokens: int = 256 * 2**20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    initializer_range: float = 0.02
    dtype: str = "bfloat16"  # autocast over float32 weights; "float32": no autocast
    gradient_checkpointing: bool = False
    checkpoint_every_seconds: float = 600.0

    def __post_init__(self):
        _positive(self, "batch_tokens", "micro_batch_tokens", "max_grad_norm", "initializer_range")
        if self.batch_tokens % self.micro_batch_tokens:
            raise ValueError(
                f"micro_batch_tokens: {self.micro_batch_tokens} must divide batch_tokens "
                f"{self.batch_tokens}"
            )
        if self.warmup_tokens < 0 or self.weight_decay < 0 or self.checkpoint_every_seconds < 0:
            raise ValueError(
                "warmup_tokens, weight_decay and checkpoint_every_seconds must not be negative"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: must be in [0, 1), got {getattr(self, name)}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: must be bfloat16 or float32, got {self.dtype!r}")


@dataclass(frozen=True)
class MeasureConfig:
    """How much text each quantity is measured on; the defaults are the paper's (Appendix B)."""

    pruned_ratio_tokens: int = 128 * 2**20
    timing_tokens: int = 32 * 2**20
    timing_repeats: int = 1
    loss_tokens: int = 2 * 10**9
    sweep_tokens: int = 32 * 2**20
    sweep_log_pruning_tolerances: list[float] = field(
        default_factory=lambda: [-1.0, -5.0, -10.0, -20.0, -40.0]
    )
    long_context_lengths: list[int] = field(default_factory=list)  # past the training length
    heads_run: str | None = (
        None  # Figures 1, 4, 5, 6; default: the largest ACP run, shortest context
    )
    sweep_run: str | None = None  # Figure 7 and what else looks at one model; default: heads_run

    def __post_init__(self):
        _positive(
            self, "pruned_ratio_tokens", "timing_tokens", "timing_repeats", "loss_tokens",
            "sweep_tokens",
        )  # fmt: skip
        if not all(value < 0 for value in self.sweep_log_pruning_tolerances):
            raise ValueError(
                "sweep_log_pruning_tolerances: each is log(epsilon), negative; got "
                f"{self.sweep_log_pruning_tolerances}"
            )


@dataclass(frozen=True)
class GridConfig:
    """Lists whose product makes the runs."""

    size: list[str]
    context_length: list[int]
    architecture: list[str] = field(default_factory=lambda: ["pro"])
    log_pruning_tolerance: list[float | None] = field(default_factory=lambda: [-10.0, None])
    seed: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self):
        for name in (f.name for f in dataclasses.fields(self)):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name}: must be a list of different values, got {values}")
        for value in self.architecture:
            if value not in ("pro", "llama"):
                raise ValueError(f"architecture: must be pro or llama, got {value!r}")
        for value in self.context_length:
            if value < 1:
                raise ValueError(f"context_length: must be positive, got {value}")
        for value in self.log_pruning_tolerance:
            if value is not None and value >= 0:
                raise ValueError(
                    "log_pruning_tolerance: is log(epsilon), negative, or null for exact "
                    f"attention; got {value}"
                )


@dataclass(frozen=True)
class Run:
    """One training run of the grid, fully resolved."""

    suite: str
    architecture: str
    size_name: str
    size: SizeConfig
    context_length: int
    log_pruning_tolerance: float | None
    seed: int
    training: TrainingConfig
    data: DataConfig

    @property
    def name(self) -> str:
        """E.g. ``pro-760m-16k-acp``; the exact twin ends in ``exact``, a further seed in ``-seed1``."""
        length = self.context_length
        tokens = f"{length // 1024}k" if length % 1024 == 0 else str(length)
        tolerance = self.log_pruning_tolerance
        method = "exact" if tolerance is None else "acp"
        if tolerance not in (None, -10.0):
            method += f"{-tolerance:g}"
        seed = f"-seed{self.seed}" if self.seed else ""
        return f"{self.architecture}-{self.size_name.lower()}-{tokens}-{method}{seed}"

    @property
    def folder(self) -> Path:
        return Path("runs") / self.suite / self.name

    def model_config(self, vocab_size: int) -> FoXConfig:
        make = FoXConfig.pro if self.architecture == "pro" else FoXConfig.llama
        return make(
            vocab_size=vocab_size,
            hidden_size=self.size.hidden_size,
            num_hidden_layers=self.size.num_hidden_layers,
            num_heads=self.size.num_heads,
            initializer_range=self.training.initializer_range,
            log_pruning_tolerance=self.log_pruning_tolerance,
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything that decides the weights, as plain values (written into the run's folder)."""
        resolved = dataclasses.asdict(self)
        resolved["training"].pop("checkpoint_every_seconds")  # changes when, not what
        return resolved


@dataclass(frozen=True)
class Suite:
    name: str
    description: str
    data: DataConfig
    sizes: dict[str, SizeConfig]
    runs: tuple[Run, ...]
    training: TrainingConfig
    measure: MeasureConfig

    def run(self, name: str) -> Run:
        """The run called ``name``.

        Raises:
            SuiteError: there is none; the message lists what there is.
        """
        for run in self.runs:
            if run.name == name:
                return run
        names = [run.name for run in self.runs]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
        raise SuiteError(f"suite {self.name} has no run {name!r}; {hint}")

    @property
    def heads_run(self) -> Run:
        """The run whose heads are looked at (Figures 1, 4, 5, 6)."""
        if self.measure.heads_run is not None:
            return self.run(self.measure.heads_run)
        runs = self.select(architecture="pro", acp=True) or list(self.runs)
        largest = max(run.size.non_embedding for run in runs)
        return min(
            (run for run in runs if run.size.non_embedding == largest),
            key=lambda run: run.context_length,
        )

    @property
    def sweep_run(self) -> Run:
        """The run on which epsilon, block size and context length are varied (Figure 7)."""
        name = self.measure.sweep_run
        return self.heads_run if name is None else self.run(name)

    def twins(self, architecture: str) -> list[Run]:
        """Runs that exist both with ACP (log epsilon = -10) and exact, all else equal (Figure 3)."""
        runs = [r for r in self.select(architecture=architecture)
                if r.log_pruning_tolerance in (-10.0, None)]  # fmt: skip
        keys = [(run.size_name, run.context_length, run.seed) for run in runs]
        return [run for run, key in zip(runs, keys, strict=True) if keys.count(key) == 2]

    def select(self, **wanted) -> list[Run]:
        """Runs whose attributes equal ``wanted``, e.g. ``architecture="pro"``; ``acp=True`` for ACP."""
        acp = wanted.pop("acp", None)
        return [
            run
            for run in self.runs
            if all(getattr(run, key) == value for key, value in wanted.items())
            and (acp is None or (run.log_pruning_tolerance is not None) == acp)
        ]


@dataclass(frozen=True)
class _SuiteFile:
    """The top level of the YAML file."""

    description: str
    data: DataConfig
    sizes: dict[str, SizeConfig]
    grid: list[GridConfig]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)


def suite_path(name: str) -> Path:
    """The file of a suite: ``experiments/NAME.yaml``, or a path that ends in ``.yaml``."""
    return Path(name) if name.endswith(".yaml") else EXPERIMENTS / f"{name}.yaml"


def load_suite(name: str) -> Suite:
    """``experiments/NAME.yaml``, or a path that ends in ``.yaml``, validated and multiplied out.

    Raises:
        SuiteError: one line with file, key and the fix.
    """
    path = suite_path(name)
    if not path.is_file():
        known = sorted(p.stem for p in EXPERIMENTS.glob("*.yaml"))
        raise SuiteError(
            f"{path}: no such suite; there are {', '.join(known) or 'none here'} "
            "(run from the project's folder)"
        )
    file = load_as(_SuiteFile, path)
    runs = []
    for index, grid in enumerate(file.grid):
        for size_name in grid.size:
            if size_name not in file.sizes:
                raise SuiteError(
                    f"{path}: grid[{index}].size: no size {size_name!r} under sizes, "
                    f"which has {', '.join(file.sizes)}"
                )
        for architecture, size_name, length, tolerance, seed in itertools.product(
            grid.architecture, grid.size, grid.context_length,
            grid.log_pruning_tolerance, grid.seed,
        ):  # fmt: skip
            if file.training.micro_batch_tokens % length:
                raise SuiteError(
                    f"{path}: training.micro_batch_tokens: {file.training.micro_batch_tokens} must "
                    f"be a multiple of the context length {length}"
                )
            run = Run(
                path.stem, architecture, size_name, file.sizes[size_name], length, tolerance, seed,
                file.training, file.data,
            )  # fmt: skip
            if any(run.name == other.name for other in runs):
                raise SuiteError(f"{path}: grid[{index}]: makes the run {run.name} a second time")
            runs.append(run)
    suite = Suite(
        path.stem, file.description, file.data, file.sizes, tuple(runs), file.training, file.measure
    )
    for key in ("heads_run", "sweep_run"):
        try:
            getattr(suite, key)
        except SuiteError as error:
            raise SuiteError(f"{path}: measure.{key}: {error}") from None
    return suite


def _positive(config, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name}: must be positive, got {getattr(config, name)}")


def main() -> None:
    """``python -m acp_repro.suite NAME``: the runs of a suite, one a line."""
    parser = argparse.ArgumentParser(prog="python -m acp_repro.suite", description=main.__doc__)
    parser.add_argument(
        "suite", nargs="?", default="cpu", help="a name in experiments/ or a YAML file"
    )
    arguments = parser.parse_args()
    try:
        suite = load_suite(arguments.suite)
    except SuiteError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{suite.name}: {suite.description}")
    for run in suite.runs:
        print(f"  {run.name}")


if __name__ == "__main__":
    main()
