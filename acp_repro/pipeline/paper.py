"""The description of a paper for the pipeline: its runs, metrics, figures, tables and claims.

Make's rules, the report, `make help`, the error messages and the default metrics of the measure command are
derived from one :class:`Paper` object. This module imports neither torch nor a drawing library.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from .errors import SuiteError, find_named
from .provenance import ORIGIN_COLUMNS
from .run import Run, WeightsConfig, file_of, option_of, run_options

RESULTS = Path("results")
FIGURES = Path("figures")
NO_RUN = "benchmark"  # the folder for metrics of a whole suite
Measure = TypeVar("Measure", bound=Callable[..., Any])


@dataclass(frozen=True)
class Suite:
    """A suite file, validated and multiplied out into its runs. ``skip_runs`` are those that the file
    excludes."""

    name: str
    paper: Paper
    file: Any
    runs: tuple[Run, ...]
    skip_runs: tuple[Run, ...] = ()

    @property
    def path(self) -> Path:
        """The file of the suite."""
        return file_of(self.name)

    @property
    def option(self) -> str:
        """The argument for ``--suite``; see ``run.option_of``."""
        return option_of(self.name)

    @property
    def description(self) -> str:
        return self.file.description

    @property
    def measure_settings(self) -> Any:
        """The settings of the measures."""
        return self.file.measure

    @property
    def weights(self) -> WeightsConfig | None:
        """The location of ready weights, for a suite without training."""
        return self.file.weights

    def run(self, name: str, key: str = "") -> Run:
        """The run called ``name``; ``key`` is the key of the suite file that names it, for an error."""
        runs = {run.name: run for run in self.runs}
        where = f"{key}: " if key else ""
        return find_named(runs, name, f"{where}suite {self.name} has no run {name!r}")

    def chosen_run(self, key: str) -> Run | None:
        """The run that ``measure.KEY`` names; None if the file does not set the key."""
        name = getattr(self.measure_settings, key)
        return None if name is None else self.run(name, f"measure.{key}")

    @property
    def run_for_heads(self) -> Run | None:
        """For a paper's own class: the run whose attention heads `make heads` shows."""
        return None

    def check(self) -> None:
        """For a paper's own class: checks the suite as a whole."""

    def check_text(self, runs: Iterable[Run]) -> None:
        """For a paper's own class: checks, without torch, that ``runs`` have text to train on."""

    def prerequisites(self, run: Run) -> list[Run]:
        """For a paper's own class: runs of the suite whose weights must exist before ``run`` begins."""
        return []

    def with_all_seeds(self, runs: Iterable[Run]) -> list[Run]:
        """``runs``, and the runs that differ from one of them only in the seed."""
        settings = {run.setting for run in runs}
        return [run for run in self.runs if run.setting in settings]


def first_seeds(runs: Iterable[Run]) -> list[Run]:
    """One run of each setting, the one with the lowest seed."""
    lowest: dict[Any, Run] = {}
    for run in runs:
        best = lowest.setdefault(run.setting, run)
        if run.seed < best.seed:
            lowest[run.setting] = run
    chosen = set(lowest.values())  # runs are slow to compare, and quick to hash
    return [run for run in runs if run in chosen]


def samples(median: str) -> tuple[str, str]:
    """The columns of a time that is measured repeatedly: ``x_ms``, the median, and ``x_samples_ms``, all
    times."""
    return median, f"{median.removesuffix('_ms')}_samples_ms"


def with_columns(*columns: str) -> Callable[[Measure], Measure]:
    """A decorator that declares the columns of the rows that a measuring function returns, in their order.

    A name ends with its unit; counts, ratios and indices need none. See also :func:`samples`.
    """

    def declare(function: Measure) -> Measure:
        function.__dict__["columns"] = columns
        return function

    return declare


@dataclass(frozen=True)
class Metric:
    """A measured quantity: ``results/SUITE/RUN/NAME.csv``.

    Attributes:
        name: of the metric and the file of its records.
        measure: returns the measuring function: ``metric.measure()(trained)`` returns the rows, whose columns
            the function declares (:func:`with_columns`). Only this call imports the function and torch. A
            ``command`` passes its own arguments to the function.
        runs: the runs of a suite on which the metric is measured.
        untrained: whether the metric depends only on a run's shape, so that no training is needed.
            ``measure`` then receives a ``Trained`` without task and model, and builds a randomly
            initialised model.
        large: whether it has thousands of rows with one provenance, so that the file is gzipped.
        command: the command that measures a metric of a whole suite, without a run.
        library: (name, extra) of a library that `make setup` leaves out, and the extra that installs it. Make
            installs it before the first such record.
        optional: whether a run may lack it, because it was measured before the metric existed and its
            weights are gone. Figures are then drawn, and claims judged, without it.
        key: with a ``command``, the columns that identify a measurement. A new row replaces the row with the
            same key, and other rows are kept. Without a ``command``, the whole file is replaced.
    """

    name: str
    measure: Callable[[], Callable[..., Iterable[Mapping[str, Any]]]]
    runs: Callable[[Suite], list[Run]] = lambda suite: list(suite.runs)
    untrained: Callable[[Run], bool] = lambda run: False
    large: bool = False
    command: str = ""
    library: tuple[str, str] | None = None
    optional: bool = False
    key: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The measured columns; imports torch."""
        return self.measure().__dict__["columns"]

    @property
    def has_library(self) -> bool:
        """Whether the required library is installed."""
        return self.library is None or importlib.util.find_spec(self.library[0]) is not None

    def path(self, suite: str, run: str = NO_RUN) -> Path:
        """``results/SUITE/RUN/METRIC.csv``, or ``.csv.gz``."""
        return RESULTS / suite / run / f"{self.name}.csv{'.gz' if self.large else ''}"

    def command_for(self, suite: str, runs: Iterable[Run] = ()) -> str:
        """The command that measures the records of all runs, or of ``runs``."""
        if self.command:
            return self.command.format(suite=option_of(suite))
        return f"python -m acp_repro.measure {self.name} {run_options(suite, (run.name for run in runs))}"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and its acceptance criterion.

    A claim is judged by ``check`` on records, shown by ``test``, or ``untested``.

    Attributes:
        claim: the statement, in a sentence.
        paper: the paper's words and their place. Or ``=QUANTITY``, the item's row of that name in the table
            of the paper's values, or ``=ITEM.QUANTITY``.
        holds_if: the complete criterion in words.
        metrics: the metrics whose records are judged, in the order of the arguments of ``check``.
        check: the criterion as a function: receives a table of records for each metric, None for an optional
            metric without records, and returns an ``analysis.verdict.Verdict``.
        items: for a claim in ``Paper.claims``, the names of the items on whose runs it is judged.
        pooled: whether it is judged once on the runs of all its items and suites, and not suite by suite.
        test: ``FILE::FUNCTION``, a test that shows the claim without records. With ``metrics``, the verdict
            of a fulfilled criterion is "tested": only a bug could violate it.
        proof: the proof or its location. The verdict of a fulfilled criterion is then "proved".
        refuted: the result of the test, if the paper is wrong as printed.
        short: a short form of the test's result.
        untested: the reason why the claim cannot be judged.
    """

    claim: str
    paper: str
    holds_if: str = ""
    metrics: tuple[str, ...] = ()
    check: Callable[..., Any] | None = None
    items: tuple[str, ...] = ()
    pooled: bool = False
    test: str = ""
    proof: str = ""
    refuted: str = ""
    short: str = ""
    untested: str = ""


@dataclass(frozen=True)
class FigureSpec:
    """A figure or table: ``make NAME`` draws ``figures/SUITE/NAME.png`` (a table: ``.md``).

    It is an entry of ``ITEMS`` in ``items`` of the paper's analysis.

    Attributes:
        name: ``figure2``, ``table4``; the target of Make and the stem of the files.
        make: ``make(found)`` returns a figure or an ``analysis.drawing.Table``, and the caption.
        title: for the report and ``make help``.
        metrics: the metrics that are drawn.
        runs: the runs that are drawn. Each run needs the records of all metrics that apply to it.
        runs_needed: a description of the runs that a suite must have.
        claims: the paper's statements about the item.
        paper_model: (size, longest context in tokens) in the paper, if scale matters.
        ours: whether the paper does not have this measurement.
        extra: whether `make figures` leaves it out, so that only its own name draws it.
    """

    name: str
    make: Callable[..., Any]
    title: str
    metrics: tuple[str, ...] = ()
    runs: Callable[[Suite], list[Run]] = lambda suite: list(suite.runs)
    runs_needed: str = ""
    claims: tuple[Claim, ...] = ()
    paper_model: tuple[str, int] | None = None
    ours: bool = False
    extra: bool = False

    def runs_with(self, suite: Suite, metric: Metric) -> list[Run]:
        """The item's runs to which a metric applies, because a table may list models that are not timed.

        All runs of the item if the metric applies to none of them.
        """
        runs, about = self.runs(suite), set(metric.runs(suite))
        return [run for run in runs if run in about] or runs

    @property
    def is_table(self) -> bool:
        return self.name.startswith("table")

    @property
    def label(self) -> str:
        """figureA1 -> "Figure A1", figure3_right -> "Figure 3 (right)", figure_kernel -> "Kernel"."""
        kind = "Table" if self.is_table else "Figure"
        number = self.name[len(kind) :]
        number, _, part = number.partition("_")
        if not number:
            return part.capitalize()
        return f"{kind} {number} ({part})" if part else f"{kind} {number}"

    def path(self, suite: str) -> Path:
        """The file that Make uses as the target of the item."""
        return FIGURES / suite / f"{self.name}{'.md' if self.is_table else '.png'}"


@dataclass(frozen=True, eq=False)
class Paper:
    """A paper that can be re-run.

    Attributes:
        name: the value of ``paper`` in a suite file.
        title, url: of the paper itself.
        file: the dataclass of a suite file (see ``suite_file.SuiteFile``), whose fields are its keys.
            The fields of an entry of ``grid`` are lists, multiplied out in this order.
        suite: the class of a loaded suite, with the paper's own checks.
        make_run: ``make_run(file, suite_name, **point)`` returns the run of a point of the grid.
        run_columns: columns of every record that identify its run; keys of ``Run.columns()``.
        metrics: the metrics, in the order of measurement.
        task: ``MODULE:NAME`` of its ``training.task.Task``, or of a function that returns a run's task.
            Imported when training starts.
        analysis: the package of its figures and tables. Its module ``items`` has ``ITEMS`` in their order,
            and may have ``CLAIMS``, the paper's other statements. Its module ``models``, if there is one,
            describes its models in the report (see ``analysis.report.gather``).
        library: (name, extra) as in :class:`Metric`, for all training runs and metrics of the paper.
    """

    name: str
    title: str
    url: str
    file: type
    suite: type[Suite]
    make_run: Callable[..., Run]
    run_columns: tuple[str, ...]
    metrics: tuple[Metric, ...]
    task: str
    analysis: str
    library: tuple[str, str] | None = None

    @functools.cached_property
    def items(self) -> tuple[FigureSpec, ...]:
        """The paper's figures and tables."""
        if (declared := self.part("items")) is None:
            raise SuiteError(
                f"paper {self.name}: the package of its figures, {self.analysis}, is missing; run from the "
                "project's folder"
            )
        return declared.ITEMS

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The paper's other claims, in the order of the paper."""
        return getattr(self.part("items"), "CLAIMS", ())

    def part(self, name: str) -> ModuleType | None:
        """A module of ``analysis``; None if there is none of that name."""
        full = f"{self.analysis}.{name}"
        try:
            found = importlib.util.find_spec(full)
        except ModuleNotFoundError:  # nor its parent package
            return None
        return importlib.import_module(full) if found else None

    def metric(self, name: str) -> Metric:
        """The metric called ``name``."""
        metrics = {metric.name: metric for metric in self.metrics}
        return find_named(metrics, name, f"paper {self.name} has no metric {name!r}")

    def item(self, name: str) -> FigureSpec:
        """The figure or table called ``name``."""
        items = {item.name: item for item in self.items}
        return find_named(items, name, f"paper {self.name} has no item {name!r}")

    def required(self, names: Iterable[str]) -> list[str]:
        """The metrics of ``names`` that are required for drawing and judging."""
        return [name for name in names if not self.metric(name).optional]

    def columns(self, metric: Metric) -> tuple[str, ...]:
        """All columns of a metric's CSV, in order; imports torch."""
        return ("suite", "run", *self.run_columns, "trained_tokens", *metric.columns, *ORIGIN_COLUMNS)

    def load_task(self) -> Callable[[Run], Any]:
        """The function that creates the task of a run; imports torch."""
        module, _, name = self.task.partition(":")
        return getattr(importlib.import_module(module), name)
