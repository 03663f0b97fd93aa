"""The rules of Make for one suite, made from the paper's registry: ``python -m acp_repro.chain.rules SUITE``.

Every target is explicit: one rule for each run's weights, each record and each figure or table. A recipe
gets ``$(FOR)``, the items that are asked for, so that one call of a command can make what several targets
lack: starting a process and loading weights takes longer than many a measure.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from . import state
from .command import command, run_command
from .paper import FIGURES, NO_RUN, Item, Paper, Quantity, Suite
from .registry import find_paper, paper_names
from .run import Run

REPORT_MODULE = "analysis.report"


def make_rules(suite: Suite) -> str:
    """All rules of a suite, for the Makefile to include."""
    paper = suite.paper
    drawn = [item for item in paper.items if can_be_drawn(suite, item)]
    usual = [item for item in drawn if is_usual(suite, item)]
    pairs = records_of(suite, drawn)
    lines = [
        f"# From {suite.path} and the registry of paper {paper.name}.",
        f"ITEMS := {_names(drawn)}",
        f"USUAL_ITEMS := {_names(usual)}",
        f"USUAL_RECORDS := {_paths(_path(suite, *pair) for pair in records_of(suite, usual))}",
        f"ALL_FIGURES := {_paths(i.path(suite.name) for i in usual if not i.is_table)}",
        f"ALL_TABLES := {_paths(i.path(suite.name) for i in usual if i.is_table)}",
    ]
    lines += _weights(suite)
    for run, quantity in pairs:
        lines += _record(suite, run, quantity)
    lines += [f".PRECIOUS: {_paths(_path(suite, *pair) for pair in pairs)}"]
    for item in paper.items:
        lines += _item(suite, item) if item in drawn else _cannot(suite, item)
    report = FIGURES / suite.name / "report.html"
    needs = [*(item.path(suite.name) for item in usual), *sources(REPORT_MODULE), *_criteria(paper)]
    lines += _rule(report, needs, [f"@$(eval drawn_report := 1)$(DO) {REPORT_MODULE} --suite {suite.option}"])
    return "\n".join(lines)


def can_be_drawn(suite: Suite, item: Item) -> bool:
    """Whether the suite has the runs of an item that can be made at all."""
    return not item.missing and bool(item.runs(suite))


def is_usual(suite: Suite, item: Item) -> bool:
    """Whether `make all` draws an item, if it can; the others are drawn by their own names."""
    return not item.extra and item.name not in suite.file.leave_out


def why_not(suite: Suite, item: Item) -> str:
    """Why an item cannot be drawn from a suite, as the words of an error."""
    if item.missing:
        return f"{item.name} cannot be made yet: {item.missing}"
    file = suite.path
    if suite.not_run and item.runs(dataclasses.replace(suite, runs=suite.runs + suite.not_run)):
        return f"{item.name}: not_run in {file} names what it needs: {item.needs}"
    aside = f" ({suite.aside})" if suite.aside else ""
    return f"{item.name}: the grid of {file} has no run of {item.needs}{aside}"


def records_of(suite: Suite, items: Iterable[Item]) -> list[tuple[Run | None, Quantity]]:
    """(run, quantity) of all records that some items are drawn from; no run for those of the whole suite."""
    pairs: dict[tuple[Run | None, Quantity], None] = {}
    for item in items:
        for quantity in map(suite.paper.quantity, item.quantities):
            runs = [None] if quantity.command else item.runs_with(suite, quantity)
            pairs |= dict.fromkeys((run, quantity) for run in runs)
    return list(pairs)


def _path(suite: Suite, run: Run | None, quantity: Quantity) -> Path:
    return quantity.path(suite.name, NO_RUN if run is None else run.name)


def _weights(suite: Suite) -> list[str]:
    lines = []
    for run in suite.runs:
        if suite.weights is None:
            recipe = f"$(TRAIN) --suite {suite.option} --run {run.name} $(FOR)"
            # Its settings hold those of what it starts from, so only the order matters here.
            first = [needed.weights_file for needed in suite.needs(run)]
            lines += _rule(run.weights_file, [state.run_stamp(run)], [recipe], first)
        else:
            message = (
                f"error: $@ is missing; it comes with the project: git checkout -- {suite.weights.folder}"
            )
            lines += _rule(run.weights_file, [], [f'@echo "{message}"; exit 1'])
    # A record is enough to draw from: weights that are gone are not made again for their own sake.
    return [*lines, f".SECONDARY: {_paths(run.weights_file for run in suite.runs)}"]


def _record(suite: Suite, run: Run | None, quantity: Quantity) -> list[str]:
    if run is None:
        return _rule(
            _path(suite, run, quantity),
            [],
            [quantity.command_for(suite.name).replace("python -m", "$(DO)", 1)],
        )
    together = [
        q.name for q in suite.paper.quantities if q is quantity or q.together == quantity.together != ""
    ]
    recipe = f"$(DO) acp_repro.measure {' '.join(together)} --suite {suite.option} --run {run.name} $(FOR)"
    lines = [recipe]
    if quantity.library:  # no prerequisite: Make would install it for records that are there
        extra = f"$(INSTALLED)-{quantity.library[1]}"
        lines.insert(0, f"@test -f {extra} || $(MAKE) --no-print-directory {extra}")
    return _rule(_path(suite, run, quantity), state.prerequisites(suite, run, quantity), lines)


def _item(suite: Suite, item: Item) -> list[str]:
    module, output = suite.paper.module_of(item), item.path(suite.name)
    records = [_path(suite, run, quantity) for run, quantity in records_of(suite, [item])]
    settings = [] if records else [suite.path]
    quiet = " > /dev/null" if item.is_table else ""
    recipe = f"@$(eval drawn_{item.name} := 1)$(DO) {module} --suite {suite.option}{quiet}"
    show = (
        f"@cat {output}" if item.is_table else f'$(if $(drawn_{item.name}),@:,@echo "figure: $(abspath $<)")'
    )
    return [
        *_rule(output, [*sources(module), *settings, *records], [recipe]),
        f".PHONY: {' '.join((item.name, *item.aliases))}",
        f"{' '.join((item.name, *item.aliases))}: {output}",
        f"\t{show}",
    ]


def _cannot(suite: Suite, item: Item) -> list[str]:
    targets = " ".join((item.name, *item.aliases))
    return [f".PHONY: {targets}", f"{targets}:", f'\t@echo "error: {why_not(suite, item)}" >&2; exit 2']


def _rule(target: Path, needs: Iterable[Path], recipe: list[str], first: Iterable[Path] = ()) -> list[str]:
    order = " ".join(filter(None, ("$(INSTALLED)", _paths(first))))
    return [f"{target}: {_paths(needs)} | {order}", *(f"\t{line}" for line in recipe)]


def _paths(paths: Iterable[Path]) -> str:
    return " ".join(dict.fromkeys(path.as_posix() for path in paths))


def _names(items: Iterable[Item]) -> str:
    return " ".join(item.name for item in items)


def _criteria(paper: Paper) -> list[Path]:
    return sources(f"{paper.analysis}.criteria")


def sources(module: str) -> list[Path]:
    """The files under the working folder that a module is made of: its own, those it imports of its
    top-level package, and the tables and templates beside them."""
    top = module.split(".")[0]
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name) if name not in found else None
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            continue
        found[name] = Path(spec.origin)
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        waiting += [n for n in _imported(Path(spec.origin), package) if n.split(".")[0] == top]
        if spec.submodule_search_locations and name == module:  # a package that is run
            waiting.append(f"{name}.__main__")
    data = {
        file for path in found.values() for file in path.parent.iterdir() if file.suffix in _DATA_SUFFIXES
    }
    here = Path.cwd()
    paths = (p.resolve() for p in (*found.values(), *data))
    return sorted(p.relative_to(here) for p in paths if p.is_relative_to(here))


_DATA_SUFFIXES = {".csv", ".css", ".j2"}


def _imported(path: Path, package: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names += [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
    return [name for name in names if _exists(name)]


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def items_in_words(suite_name: str) -> str:
    """Every item with its title, a line each: of the suite's paper, or of all where nothing can read it."""
    try:
        from .suite import load_suite

        papers = [load_suite(suite_name).paper]
    except ImportError:  # nothing is installed yet
        papers = [find_paper(name) for name in paper_names()]
    lines = []
    for paper in papers:
        lines.append(f"  of {paper.title}:")
        lines += [f"    make {item.name:<15} {item.title}" for item in paper.items if not item.missing]
    return "\n".join(lines)


@command()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m acp_repro.chain.rules", description=__doc__)
    parser.add_argument("suite", help="a name in experiments/ or a YAML file")
    parser.add_argument("--items", action="store_true", help="list figures and tables in words instead")
    options = parser.parse_args(arguments)
    if options.items:
        print(items_in_words(options.suite))
        return
    from .suite import load_suite

    suite = load_suite(options.suite)
    state.write_stamps(suite)
    print(make_rules(suite))


if __name__ == "__main__":
    run_command(main)
