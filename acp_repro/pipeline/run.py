"""One training run of a suite, and the settings that every paper's runs share."""

import dataclasses
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ..common.bounds import NotNegative, PositiveOrInf, ShareBelow1, number

RUNS = Path("runs")
EXPERIMENTS = Path("experiments")


class SuiteName(str):
    """The name of a suite and of its folders, with its source ``file``."""

    file: Path

    def __new__(cls, name: str, file: Path | None = None):
        made = super().__new__(cls, name)
        made.file = file or EXPERIMENTS / f"{name}.yaml"
        return made


def file_of(suite: str) -> Path:
    """The file of the suite of that name."""
    return suite.file if isinstance(suite, SuiteName) else SuiteName(suite).file


def option_of(suite: str) -> str:
    """The argument for ``--suite``, quoted for a shell: the name, or the file if it is not in
    ``experiments/``."""
    file = file_of(suite)
    return suite if file == SuiteName(suite).file else shlex.quote(file.as_posix())


def run_options(suite: str, names: Iterable[str]) -> str:
    """The options of a command that select a suite and some of its runs; without names, all runs."""
    return f"--suite {option_of(suite)}" + "".join(f" --run {name}" for name in names)


class Strict:
    """A base for dataclasses that are read from YAML: an unknown key is an error."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


def check_divides(settings: Strict, part: str, whole: str) -> None:
    """Raises ValueError unless the setting called ``part`` divides the one called ``whole``, or is None."""
    divisor, value = getattr(settings, part), getattr(settings, whole)
    if divisor is not None and value % divisor:
        raise ValueError(f"{part}: {divisor} must divide {whole} {value}")


PARALLEL = ("auto", "ddp", "fsdp")  # how several processes share a run


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Strict):
    """The settings of the shared trainer in a run's ``training``; the defaults are those of ACP's Appendix B.

    ``compile``, ``parallel`` and ``checkpoint_every_seconds`` affect only the execution, so they may change
    when a run is resumed.

    Attributes:
        weight_decay: weight decay of Adam or AdamW.
        beta1: decay rate of Adam's first moment.
        beta2: decay rate of Adam's second moment.
        max_grad_norm: gradient norm above which gradients are clipped.
        dtype: dtype of products, by autocast over float32 weights.
        gradient_checkpointing: whether the backward pass recomputes activations, to save memory.
        compile: whether blocks go through ``torch.compile`` on a GPU (never on a CPU).
        parallel: how several processes share a run.
        checkpoint_every_seconds: time from one checkpoint to the next.
    """

    HOW: ClassVar = ("compile", "parallel", "checkpoint_every_seconds")

    weight_decay: NotNegative = 0.1
    beta1: ShareBelow1 = 0.9
    beta2: ShareBelow1 = 0.95
    max_grad_norm: PositiveOrInf = 1.0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    gradient_checkpointing: bool = False
    compile: bool = True
    parallel: Literal[PARALLEL] = "auto"
    checkpoint_every_seconds: Annotated[float, number("a number of at least 0", lambda x: x >= 0)] = 600.0


@dataclass(frozen=True)
class WeightsConfig(Strict):
    """Ready weights instead of training: the runs of the suite are in ``folder/RUN``.

    Each run folder contains config.json, model.safetensors, tokenizer.json and done.json, without ``model/``.

    Attributes:
        folder: the folder of trained weights, for a suite without training.
        trained_by: the suite that trains a run of the same name.
    """

    folder: str
    trained_by: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Run(ABC):
    """One training run, fully resolved; a paper's own class (``eq=False`` too) adds the axes of its grid."""

    suite: str
    seed: int
    training: TrainerConfig
    weights: WeightsConfig | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its folder, different for every run of a suite."""

    @property
    @abstractmethod
    def setting(self) -> tuple:
        """The value that is equal for all seeds of one setting."""

    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """The values of ``Paper.run_columns``."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Not by ``astuple``, which copies all settings: pages of many runs would take twice as long.
        return type(other) is type(self) and all(
            getattr(self, field.name) == getattr(other, field.name) for field in dataclasses.fields(self)
        )

    def __hash__(self) -> int:
        return hash((self.suite, self.name))  # settings hold dicts

    def parallel_mode(self, ranks: int) -> str:
        """``none`` for one rank, else ``ddp`` or ``fsdp``; ``auto`` is ddp unless a paper chooses
        otherwise."""
        if ranks == 1:
            return "none"
        return "ddp" if self.training.parallel == "auto" else self.training.parallel

    @property
    def folder(self) -> Path:
        """``runs/SUITE/RUN``, or the folder of the suite's ready weights."""
        return (
            RUNS / self.suite / self.name if self.weights is None else Path(self.weights.folder) / self.name
        )

    @property
    def model_folder(self) -> Path:
        """The folder of model.safetensors."""
        return self.folder / "model" if self.weights is None else self.folder

    @property
    def weights_file(self) -> Path:
        return self.model_folder / "model.safetensors"

    @property
    def command(self) -> str:
        """The command that trains these weights."""
        suite = option_of(self.suite) if self.weights is None else self.weights.trained_by
        return f"python -m acp_repro.train --suite {suite} --run {self.name}"

    def as_dict(self) -> dict[str, Any]:
        """Returns every setting that affects the weights, as plain values for ``run.json``.

        The settings of a run from whose weights this run starts are included.
        """
        resolved = dataclasses.asdict(self)
        for name, value in vars(self).items():
            if isinstance(value, Run):
                resolved[name] = value.as_dict()
        for name in self.training.HOW:
            resolved["training"].pop(name, None)
        del resolved["weights"]
        return resolved
