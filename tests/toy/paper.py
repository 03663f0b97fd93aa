"""The keys of a suite, how a run is named, and what is measured and drawn."""

from dataclasses import dataclass, field

from acp_repro.common.bounds import Axis, Count
from acp_repro.pipeline.paper import Paper, Quantity, Suite
from acp_repro.pipeline.run import Run, Strict, TrainerConfig
from acp_repro.pipeline.suite import SuiteFile


@dataclass(frozen=True)
class Grid(Strict):
    width: Axis[Count]
    seed: Axis[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class Measure(Strict):
    batches: int = 2


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    grid: list[Grid]
    training: TrainerConfig = field(default_factory=lambda: TrainerConfig(dtype="float32"))
    measure: Measure = field(default_factory=Measure)


@dataclass(frozen=True, kw_only=True, eq=False)
class ToyRun(Run):
    width: int
    name = property(lambda self: f"width{self.width}-seed{self.seed}")
    setting = property(lambda self: (self.width,))

    def columns(self):
        return {"width": self.width, "seed": self.seed}


def make_run(file, suite, where, *, width, seed):
    return ToyRun(suite=suite, seed=seed, training=file.training, weights=file.weights, width=width)


PAPER = Paper(
    name="toy",
    title="Toys that learn",
    url="https://example.org/toys",
    file=File,
    suite=Suite,
    make_run=make_run,
    run_columns=("width", "seed"),
    quantities=(Quantity("error", "squared_error", "tests.toy.task:measure_error"),),
    task="tests.toy.task:ToyTask",
    analysis="tests.toy",
)
