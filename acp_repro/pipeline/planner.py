"""Plans the steps that a figure needs, for Make and for the commands.

A *target* is the weights of a run, a record, an item (figure or table), the page of a model's heads, the
report, or REPRODUCTION.md. ``needs`` returns the dependencies of a target, and ``missing`` the targets that
must be built. ``freshness`` decides whether weights and records are up to date. Figures, tables and reports
are always drawn again, because drawing takes seconds.
"""

import dataclasses
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

from . import freshness
from .errors import SuiteError, UnknownName
from .paper import FIGURES, FigureSpec, Metric, Suite
from .run import Run, run_options

Record = tuple[Run | None, Metric]  # no run for a metric of the whole suite
HEADS, REPORT, REPRODUCTION = "heads", "report", "reproduction"
HEADS_TITLE = "Every head of a model, and which tokens each token attends to"
Drawn = FigureSpec | str
Target = Run | Record | Drawn


def targets(suite: Suite, goals: Sequence[str]) -> list[Target]:
    """The targets of Make's goals: names of items, and names such as ``figures`` for several."""
    paper, usual = suite.paper, usual_items(suite)
    known: dict[str, list[Target]] = {
        **{item.name: [item] for item in paper.items if item.runs(suite)},
        **({HEADS: [HEADS]} if suite.run_for_heads else {}),
        "records": [*records_of(suite, usual)],
        "figures": [item for item in usual if not item.is_table],
        "tables": [item for item in usual if item.is_table],
        "all": [REPORT],
        REPORT: [REPORT],
        REPRODUCTION: [REPRODUCTION],
    }
    for goal in goals:
        if goal not in known and goal in (item.name for item in paper.items):
            raise SuiteError(why_not(suite, paper.item(goal)))
        if goal not in known:
            raise UnknownName.among(f"nothing is called {goal} (make help lists all)", goal, known)
    return [target for goal in goals for target in known[goal]]


def usual_items(suite: Suite) -> list[FigureSpec]:
    """The items that `make all` draws."""
    return [item for item in suite.paper.items if item.runs(suite) and is_usual(suite, item)]


def is_usual(suite: Suite, item: FigureSpec) -> bool:
    """Whether `make all` draws an item if possible; other items are drawn only by name."""
    return not item.extra and item.name not in suite.file.skip_items


def why_not(suite: Suite, item: FigureSpec) -> str:
    """The error message that explains why an item cannot be drawn from a suite."""
    file = suite.path
    if suite.skip_runs and item.runs(dataclasses.replace(suite, runs=suite.runs + suite.skip_runs)):
        return f"{item.name}: skip_runs in {file} names what it needs: {item.runs_needed}"
    return f"{item.name}: the grid of {file} has no run of {item.runs_needed}"


def records_of(suite: Suite, items: Iterable[FigureSpec]) -> list[Record]:
    """All records from which ``items`` are drawn."""
    pairs: dict[Record, None] = {}
    for item in items:
        for metric in map(suite.paper.metric, item.metrics):
            runs = [None] if metric.command else item.runs_with(suite, metric)
            if metric.optional:
                runs = [run for run in runs if not freshness.is_lost(run, metric)]
            pairs |= dict.fromkeys((run, metric) for run in runs)
    return list(pairs)


def needs(suite: Suite, target: Target) -> Sequence[Target]:
    """The dependencies of a target."""
    match target:
        case Run():
            return suite.prerequisites(target)
        case (run, metric):
            return [] if run is None or metric.untrained(run) else [run]
        case FigureSpec():
            return records_of(suite, [target])
        case _ if target == HEADS:
            return [suite.run_for_heads]
        case _:
            return usual_items(suite) if target == REPORT else []


def missing(suite: Suite, wanted: Collection[Target]) -> list[Target]:
    """The outdated targets among ``wanted`` and their dependencies, in topological order.

    Weights are missing only if an outdated target needs them: records remain valid without their weights.
    """
    graph: dict[Target, Sequence[Target]] = {}
    waiting = [*wanted]
    while waiting:
        target = waiting.pop()
        if target not in graph:
            graph[target] = needs(suite, target)
            waiting += graph[target]
    order = list(TopologicalSorter(graph).static_order())
    stale: set[Target] = set()
    asked = set(wanted)
    for target in reversed(order):
        if (not isinstance(target, Run) or target in asked) and not is_current(suite, target):
            stale.add(target)
            asked.update(graph[target])
    for target in order:  # targets that depend on an outdated target are outdated too
        if not isinstance(target, Run) and not stale.isdisjoint(graph[target]):
            stale.add(target)
    return [target for target in order if target in stale]


def is_current(suite: Suite, target: Target) -> bool:
    """Whether a target is up to date; drawn targets never are."""
    match target:
        case Run():
            return freshness.has_weights(target)
        case (run, metric):
            return freshness.is_current(suite, run, metric)
    return False


def training_groups(suite: Suite, runs: Sequence[Run]) -> Iterator[list[Run]]:
    """``runs`` in groups; each group depends only on the weights of earlier groups."""
    sorter = TopologicalSorter({run: [n for n in suite.prerequisites(run) if n in runs] for run in runs})
    sorter.prepare()
    while sorter.is_active():
        ready = sorter.get_ready()
        yield [run for run in runs if run in ready]
        sorter.done(*ready)


Step = tuple[str, FigureSpec | None]  # a command, and the item that the command draws


def stages(suite: Suite, stale: Sequence[Target], train_options: str = "") -> list[list[Step]]:
    """The commands for missing targets, with the item that each draws; a stage needs all earlier stages."""
    runs = [run for run in suite.runs if run in stale]
    records = [target for target in stale if isinstance(target, tuple)]
    extras = {q.library[1] for _, q in records if not q.has_library}
    if suite.paper.library and (runs or records) and not importlib.util.find_spec(suite.paper.library[0]):
        extras.add(suite.paper.library[1])
    drawn = [item for item in suite.paper.items if item in stale]
    every = [
        [(f"make .venv/installed-{extra}", None) for extra in sorted(extras)],
        [(train_command(suite, runs) + train_options, None)] if runs else [],
        [(command, None) for command in measure_commands(suite, records)],
        [(f"python -m analysis {item.name} --suite {suite.option}", item) for item in drawn],
        [(heads_command(suite), None)] if HEADS in stale else [],
        [(f"python -m analysis.report --suite {suite.option}", None)] * (REPORT in stale),
        [("python -m analysis.reproduction", None)] * (REPRODUCTION in stale),
    ]
    return [stage for stage in every if stage]


def heads_page(suite: Suite) -> Path:
    """The file that `make heads` writes."""
    return FIGURES / suite.name / f"{HEADS}.html"


def heads_command(suite: Suite) -> str:
    """The command that writes the page of the heads of ``suite.run_for_heads``."""
    return f"python -m acp_repro.inspect {suite.run_for_heads.model_folder} --html {heads_page(suite)}"


def train_command(suite: Suite, runs: Iterable[Run]) -> str:
    """The command that trains some runs."""
    return f"python -m acp_repro.train {run_options(suite.name, (run.name for run in runs))}"


def measure_commands(suite: Suite, records: Iterable[Record]) -> list[str]:
    """The commands that measure some records: one command for all runs with the same metrics."""
    by_run: dict[Run | None, list[Metric]] = {}
    for run, metric in records:
        by_run.setdefault(run, []).append(metric)
    commands = [metric.command_for(suite.name) for metric in by_run.pop(None, [])]
    alike: dict[str, list[str]] = {}  # metrics to the names of runs
    for run in suite.runs:
        if run in by_run:
            metrics = " ".join(q.name for q in suite.paper.metrics if q in by_run[run])
            alike.setdefault(metrics, []).append(run.name)
    for metrics, names in alike.items():
        commands.append(f"python -m acp_repro.measure {metrics} {run_options(suite.name, names)}")
    return commands
