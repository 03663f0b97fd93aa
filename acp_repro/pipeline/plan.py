"""Plans what is missing for a figure, for Make and for the commands alike.

A *target* is the weights of a run, a record, an item (figure or table), a page, the report, or
REPRODUCTION.md. ``needs`` gives the graph, and ``missing`` what of it is stale. ``state`` judges weights and
records. A figure is current if the JSON beside it has the hashes of its records, its code and itself.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

from ..common import files
from . import state
from .errors import SuiteError, UnknownName
from .paper import FIGURES, NO_RUN, RESULTS, Item, Page, Quantity, Suite
from .registry import paper_module
from .run import EXPERIMENTS, Run

Record = tuple[Run | None, Quantity]  # no run for a quantity of the whole suite
REPORT, REPRODUCTION = "report", "reproduction"
Drawn = Item | Page | str
Target = Run | Record | Drawn


def targets(suite: Suite, goals: Sequence[str]) -> list[Target]:
    """The targets of Make's goals: names of items and pages, and names such as ``figures`` for several."""
    paper, usual = suite.paper, usual_items(suite)
    known: dict[str, list[Target]] = {
        **{
            one.name: [one]
            for one in (*paper.items, *paper.pages)
            if isinstance(one, Page) or one.runs(suite)
        },
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


def usual_items(suite: Suite) -> list[Item]:
    """The items that `make all` draws."""
    return [item for item in suite.paper.items if item.runs(suite) and is_usual(suite, item)]


def is_usual(suite: Suite, item: Item) -> bool:
    """Whether `make all` draws an item, if it can; other items are drawn by their own names."""
    return not item.extra and item.name not in suite.file.leave_out


def why_not(suite: Suite, item: Item) -> str:
    """Why an item cannot be drawn from a suite, as the words of an error."""
    file = suite.path
    if suite.not_run and item.runs(dataclasses.replace(suite, runs=suite.runs + suite.not_run)):
        return f"{item.name}: not_run in {file} names what it needs: {item.runs_needed}"
    restriction = f" ({suite.restriction})" if suite.restriction else ""
    return f"{item.name}: the grid of {file} has no run of {item.runs_needed}{restriction}"


def records_of(suite: Suite, items: Iterable[Item]) -> list[Record]:
    """All records that some items are drawn from."""
    pairs: dict[Record, None] = {}
    for item in items:
        for quantity in map(suite.paper.quantity, item.quantities):
            runs = [None] if quantity.command else item.runs_with(suite, quantity)
            if quantity.optional:
                runs = [run for run in runs if not state.is_lost(run, quantity)]
            pairs |= dict.fromkeys((run, quantity) for run in runs)
    return list(pairs)


def needs(suite: Suite, target: Target) -> Sequence[Target]:
    """What must be made before a target."""
    match target:
        case Run():
            return suite.prerequisites(target)
        case (run, quantity):
            return [] if run is None or quantity.untrained(run) else [run]
        case Item():
            return records_of(suite, [target])
        case Page():
            return [target.run(suite)]
        case _:
            return usual_items(suite) if target == REPORT else []


def missing(suite: Suite, wanted: Collection[Target]) -> list[Target]:
    """The targets behind ``wanted`` that are not current, each after those that it needs.

    Weights are missing only where something that is not current needs them: records outlive their weights.
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
    for target in order:  # and what is made from it
        if not isinstance(target, Run) and not stale.isdisjoint(graph[target]):
            stale.add(target)
    return [target for target in order if target in stale]


def is_current(suite: Suite, target: Target) -> bool:
    """Whether a target need not be made, for its own sake."""
    match target:
        case Run():
            return state.has_weights(target)
        case (run, quantity):
            return state.is_current(suite, run, quantity)
    path = output(suite, target)
    made_of = fingerprint(suite, target)
    return path.is_file() and state.read_json(_proof_path(path)) == made_of | {
        "sha256": files.sha256_of(path)
    }


def training_groups(suite: Suite, runs: Sequence[Run]) -> Iterator[list[Run]]:
    """``runs`` in groups: each group needs only the weights of groups before it."""
    sorter = TopologicalSorter({run: [n for n in suite.prerequisites(run) if n in runs] for run in runs})
    sorter.prepare()
    while sorter.is_active():
        ready = sorter.get_ready()
        yield [run for run in runs if run in ready]
        sorter.done(*ready)


Step = tuple[str, Drawn | None]


def stages(suite: Suite, stale: Sequence[Target], train_options: str = "") -> list[list[Step]]:
    """The commands that make what is missing, with what each draws; a stage needs those before it."""
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
        [(page.command_for(suite), page) for page in suite.paper.pages if page in stale],
        [(f"python -m analysis.report --suite {suite.option}", REPORT)] * (REPORT in stale),
        [("python -m analysis.reproduction", REPRODUCTION)] * (REPRODUCTION in stale),
    ]
    return [stage for stage in every if stage]


def train_command(suite: Suite, runs: Sequence[Run]) -> str:
    """The command that trains some runs."""
    return f"python -m acp_repro.train --suite {suite.option}" + "".join(f" --run {run.name}" for run in runs)


def measure_commands(suite: Suite, records: Iterable[Record]) -> list[str]:
    """The commands that measure some records: one for all runs of which the same is measured."""
    by_run: dict[Run | None, list[Quantity]] = {}
    for run, quantity in records:
        by_run.setdefault(run, []).append(quantity)
    commands = [quantity.command_for(suite.name) for quantity in by_run.pop(None, [])]
    alike: dict[str, list[Run]] = {}
    for run in suite.runs:
        if run in by_run:
            groups = {quantity.group for quantity in by_run[run]} - {""}
            together = (q for q in suite.paper.quantities if q in by_run[run] or q.group in groups)
            names = " ".join(quantity.name for quantity in together)
            alike.setdefault(names, []).append(run)
    for names, runs in alike.items():
        named = "".join(f" --run {run.name}" for run in runs)
        commands.append(f"python -m acp_repro.measure {names} --suite {suite.option}{named}")
    return commands


def output(suite: Suite, target: Drawn) -> Path:
    """The file that is the last to be written of a target."""
    if target == REPRODUCTION:
        return Path("REPRODUCTION.md")
    return FIGURES / suite.name / "report.html" if target == REPORT else target.path(suite.name)


def write_proof(suite: Suite, target: Drawn, made_of: dict[str, str]) -> None:
    """Writes the JSON beside a figure, a table or a page; ``made_of`` is its fingerprint from before it was
    made."""
    path = output(suite, target)
    files.write_json(_proof_path(path), made_of | {"sha256": files.sha256_of(path)})


def _proof_path(path: Path) -> Path:
    return path.with_suffix(".json")


def fingerprint(suite: Suite, target: Drawn) -> dict[str, str]:
    """Hashes of what a figure, a table or a page is made from: files as they are now, code as it was read."""
    paper, name, code = suite.paper, suite.name, set()
    match target:
        case Item():
            records = records_of(suite, [target])
            inputs = [q.path(name, NO_RUN if run is None else run.name) for run, q in records]
            code.update(sources(target.make.__module__), sources(paper_module(paper.name)))
        case Page():
            inputs = [target.run(suite).folder / "done.json"]
            code.update(sources(target.module))
        case "report":  # the JSON beside a figure stands for its code, and so for that of its claims
            inputs = [*RESULTS.glob(f"{name}/*/*.csv*"), *FIGURES.glob(f"{name}/*.*"), Path("claims.json")]
            code.update(sources("analysis.report"), sources(f"{paper.analysis}.items"))
        case _:
            inputs = [
                *RESULTS.glob("*/*/*.csv*"),
                *EXPERIMENTS.glob("*.yaml"),
                *(path for kind in ("csv", "toml", "md") for path in Path("analysis").rglob(f"*.{kind}")),
            ]
            code.update(Path("analysis").rglob("*.py"), Path("acp_repro/pipeline/papers").glob("*/*.py"))
    own = output(suite, target).stem
    inputs = [path for path in (*inputs, suite.path) if path.is_file() and path.stem != own]
    return {"inputs": _digest(inputs, files.sha256_of), "sources": _digest(code, _hash_of_code)}


def _digest(paths: Iterable[Path], hash_of: Callable[[Path], str]) -> str:
    lines = [f"{path.as_posix()} {hash_of(path)}\n" for path in sorted(paths)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# Once a process: a figure that this process draws is of the modules that it read at its start.
_hash_of_code = functools.cache(files.sha256_of)


@functools.cache
def sources(module: str) -> frozenset[Path]:
    """The files of a module and of all that it imports, and the data and templates beside them."""
    packages = ("acp_repro", "analysis", module.partition(".")[0])
    found: dict[str, Path] = {}
    waiting = [module, f"{module}.__main__"]  # a package that is run
    while waiting:
        name = waiting.pop()
        ours = f"{name}.".startswith(tuple(f"{package}." for package in packages))
        if ours and name not in found and (path := _file(name)):
            found[name] = path
            waiting += _imports(name, path)
    folders = {path.parent for path in found.values()}
    data = {path for folder in folders for path in folder.iterdir() if path.suffix in _DATA}
    return frozenset({*found.values(), *data})


_DATA = {".csv", ".toml", ".css", ".j2", ".html", ".js"}


@functools.cache
def _imports(name: str, path: Path) -> list[str]:
    """All that a module may import, anywhere in it."""
    names: list[str] = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
    return names


@functools.cache
def _file(name: str) -> Path | None:
    """The file of a module. Its `find_spec` would import its parent packages, and with one of them torch."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*rest)
    return next((f for f in (place / "__init__.py", place.with_suffix(".py")) if f.is_file()), None)
