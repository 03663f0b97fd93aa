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
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .data.config import DataConfig
from .model.config import FoXConfig
from .settings import SIZE_OVERRIDES, GridConfig, MeasureConfig, SizeConfig, TrainingConfig, WeightsConfig
from .strict_yaml import SuiteError, load_as

EXPERIMENTS = Path("experiments")
# Below this many weights in the blocks each rank keeps them all (DDP); above, each keeps a share (FSDP2).
FSDP_FROM = 300_000_000


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
    weights: WeightsConfig | None = None

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
    def setting(self) -> tuple:
        """What two seeds of one setting have in common."""
        return self.architecture, self.size_name, self.context_length, self.log_pruning_tolerance

    def parallel_mode(self, ranks: int) -> str:
        """``none`` for one rank, else ``ddp`` or ``fsdp``: the settings' choice, or by size for ``auto``."""
        if ranks == 1:
            return "none"
        if self.training.parallel != "auto":
            return self.training.parallel
        return "fsdp" if self.size.non_embedding >= FSDP_FROM else "ddp"

    @property
    def folder(self) -> Path:
        """``runs/SUITE/RUN``, or where the suite's ready weights lie."""
        if self.weights is not None:
            return Path(self.weights.folder) / self.name
        return Path("runs") / self.suite / self.name

    @property
    def model_folder(self) -> Path:
        """Where config.json and model.safetensors are."""
        return self.folder / "model" if self.weights is None else self.folder

    @property
    def command(self) -> str:
        """The command that trains these weights."""
        suite = self.suite if self.weights is None else self.weights.trained_by
        return f"python -m acp_repro.train --suite {suite} --run {self.name}"

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
        for name in ("compile", "parallel", "checkpoint_every_seconds"):  # how, not what
            resolved["training"].pop(name)
        for name in SIZE_OVERRIDES:  # stands under training
            resolved["size"].pop(name)
        del resolved["weights"]
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
    weights: WeightsConfig | None = None

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
            (run for run in runs if run.size.non_embedding == largest), key=lambda run: run.context_length
        )

    @property
    def sweep_run(self) -> Run:
        """The run on which epsilon, block size and context length are varied (Figure 7)."""
        name = self.measure.sweep_run
        return self.heads_run if name is None else self.run(name)

    def twins(self, architecture: str) -> list[Run]:
        """Runs that exist both with ACP (log epsilon = -10) and exact, all else equal (Figure 3)."""
        runs = [r for r in self.select(architecture=architecture) if r.log_pruning_tolerance in (-10.0, None)]
        keys = [(run.size_name, run.context_length, run.seed) for run in runs]
        return [run for run, key in zip(runs, keys, strict=True) if keys.count(key) == 2]

    def with_all_seeds(self, runs: list[Run]) -> list[Run]:
        """``runs`` and those that differ from one of them in the seed alone."""
        settings = {run.setting for run in runs}
        return [run for run in self.runs if run.setting in settings]

    def select(self, **wanted) -> list[Run]:
        """Runs whose attributes equal ``wanted``, e.g. ``architecture="pro"``; ``acp=True`` for ACP."""
        acp = wanted.pop("acp", None)
        return [
            run
            for run in self.runs
            if all(getattr(run, key) == value for key, value in wanted.items())
            and (acp is None or (run.log_pruning_tolerance is not None) == acp)
        ]


def first_seeds(runs: list[Run]) -> list[Run]:
    """One run of each setting: what is saved hardly depends on the seed, so it is measured once."""
    lowest: dict[tuple, int] = {}
    for run in runs:
        lowest[run.setting] = min(run.seed, lowest.get(run.setting, run.seed))
    return [run for run in runs if run.seed == lowest[run.setting]]


@dataclass(frozen=True)
class _SuiteFile:
    """The top level of the YAML file."""

    description: str
    data: DataConfig
    sizes: dict[str, SizeConfig]
    grid: list[GridConfig]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    weights: WeightsConfig | None = None


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
            grid.architecture, grid.size, grid.context_length, grid.log_pruning_tolerance, grid.seed
        ):
            size = file.sizes[size_name]
            try:
                training = dataclasses.replace(file.training, **size.training_overrides)
            except ValueError as error:
                raise SuiteError(f"{path}: sizes.{size_name}.{error}") from None
            if training.micro_batch_tokens % length:
                where = "training" if size.micro_batch_tokens is None else f"sizes.{size_name}"
                raise SuiteError(
                    f"{path}: {where}.micro_batch_tokens: {training.micro_batch_tokens} must "
                    f"be a multiple of the context length {length}"
                )
            run = Run(
                path.stem,
                architecture,
                size_name,
                size,
                length,
                tolerance,
                seed,
                training,
                file.data,
                file.weights,
            )
            if any(run.name == other.name for other in runs):
                raise SuiteError(f"{path}: grid[{index}]: makes the run {run.name} a second time")
            runs.append(run)
    suite = Suite(
        path.stem,
        file.description,
        file.data,
        file.sizes,
        tuple(runs),
        file.training,
        file.measure,
        file.weights,
    )
    for key in ("heads_run", "sweep_run"):
        try:
            getattr(suite, key)
        except SuiteError as error:
            raise SuiteError(f"{path}: measure.{key}: {error}") from None
    return suite


def main() -> None:
    """``python -m acp_repro.suite NAME``: the runs of a suite, one a line."""
    parser = argparse.ArgumentParser(prog="python -m acp_repro.suite", description=main.__doc__)
    parser.add_argument("suite", nargs="?", default="cpu", help="a name in experiments/ or a YAML file")
    parser.add_argument("--names", action="store_true", help="names of the runs and nothing else")
    arguments = parser.parse_args()
    try:
        suite = load_suite(arguments.suite)
    except SuiteError as error:
        raise SystemExit(f"error: {error}") from None
    if arguments.names:
        print("\n".join(run.name for run in suite.runs))
        return
    print(f"{suite.name}: {suite.description}")
    for run in suite.runs:
        print(f"  {run.name}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    main()
