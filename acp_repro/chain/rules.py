"""The rules of Make for one suite, made from the paper's registry: ``python -m acp_repro.chain.rules SUITE``.

Every target is explicit: one rule for each run's weights, each record and each figure or table. ``state``
decides which weights and records are up to date. Those depend on nothing; the others depend on a file that is
newer than all. Figures and tables depend on the dates of their records. A recipe gets ``$(FOR)``, the items
that are made, so that one call of a command can make what several targets lack. This saves time, because
starting a process and loading weights takes longer than many measures.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ..common import files
from ..common.command import command, run_command
from ..common.docs import plain
from . import state
from .paper import FIGURES, NO_RUN, Item, Page, Paper, Quantity, Suite
from .registry import find_paper, paper_module, paper_names
from .run import Run
from .suite import load_suite

REPORT_MODULE = "analysis.report"
REPRODUCTION_MODULE = "analysis.reproduction"


def make_rules(suite: Suite) -> str:
    """All rules of a suite, for the Makefile to include."""
    paper = suite.paper
    drawn = [item for item in paper.items if item.runs(suite)]
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
    # Weights too: a recipe that is stopped may have finished its own run, and be training another.
    kept = [*(run.weights_file for run in suite.runs), *(_path(suite, *pair) for pair in pairs)]
    lines += [f".PRECIOUS: {_paths(kept)}"]
    for item in paper.items:
        lines += _item(suite, item) if item in drawn else _cannot(suite, item)
    for page in paper.pages:
        lines += _page(suite, page)
    return "\n".join([*lines, *_report(suite, usual), *_reproduction()])


def is_usual(suite: Suite, item: Item) -> bool:
    """Whether `make all` draws an item, if it can; other items are drawn by their own names."""
    return not item.extra and item.name not in suite.file.leave_out


def why_not(suite: Suite, item: Item) -> str:
    """Why an item cannot be drawn from a suite, as the words of an error."""
    file = suite.path
    if suite.not_run and item.runs(dataclasses.replace(suite, runs=suite.runs + suite.not_run)):
        return f"{item.name}: not_run in {file} names what it needs: {item.runs_needed}"
    aside = f" ({suite.aside})" if suite.aside else ""
    return f"{item.name}: the grid of {file} has no run of {item.runs_needed}{aside}"


def records_of(suite: Suite, items: Iterable[Item]) -> list[tuple[Run | None, Quantity]]:
    """(run, quantity) of all records that some items are drawn from; no run for those of the whole suite."""
    pairs: dict[tuple[Run | None, Quantity], None] = {}
    for item in items:
        for quantity in map(suite.paper.quantity, item.quantities):
            runs = [None] if quantity.command else item.runs_with(suite, quantity)
            if quantity.optional:
                runs = [run for run in runs if not state.is_lost(run, quantity)]
            pairs |= dict.fromkeys((run, quantity) for run in runs)
    return list(pairs)


def _path(suite: Suite, run: Run | None, quantity: Quantity) -> Path:
    return quantity.path(suite.name, NO_RUN if run is None else run.name)


def _weights(suite: Suite) -> list[str]:
    lines = []
    for run in suite.runs:
        if suite.weights is None:
            recipe = f"$(TRAIN) --suite {suite.option} --run {run.name} $(FOR)"
            # Its settings include those of the run that it starts from, so only the order matters here.
            first = [needed.weights_file for needed in suite.prerequisites(run)]
            other = run.weights_file.is_file() and not state.has_weights(run)
            lines += _rule(run.weights_file, [_stale(suite)] * other, [recipe], first)
        else:
            message = (
                f"error: $@ is missing; it comes with the project: git checkout -- {suite.weights.folder}"
            )
            lines += _rule(run.weights_file, [], [f'@echo "{message}"; exit 1'])
    # A record is enough to draw from, so missing weights are not trained again if there is one.
    return [*lines, f".SECONDARY: {_paths(run.weights_file for run in suite.runs)}"]


def _record(suite: Suite, run: Run | None, quantity: Quantity) -> list[str]:
    if run is None:
        return _rule(
            _path(suite, run, quantity),
            [],
            [quantity.command_for(suite.name).replace("python -m", "$(DO)", 1)],
        )
    group = [q.name for q in suite.paper.quantities if q is quantity or q.group == quantity.group != ""]
    recipe = f"$(DO) acp_repro.measure {' '.join(group)} --suite {suite.option} --run {run.name} $(FOR)"
    lines = [recipe]
    if quantity.library:  # no prerequisite: Make would install it even for existing records
        extra = f"$(INSTALLED)-{quantity.library[1]}"
        lines.insert(0, f"@test -f {extra} || $(MAKE) --no-print-directory {extra}")
    current = state.is_current(suite, run, quantity)
    # A record that is up to date depends only on missing weights that this call trains again.
    follows = not quantity.untrained(run) and not (current and run.weights_file.is_file())
    needs = [run.weights_file] * follows + [_stale(suite)] * (not current)
    return _rule(_path(suite, run, quantity), needs, lines)


def _stale(suite: Suite) -> Path:
    """A file that is newer than all that existed when the rules were made."""
    return state.MAKE / suite.name / "stale"


def _item(suite: Suite, item: Item) -> list[str]:
    output = item.path(suite.name)
    records = [_path(suite, run, quantity) for run, quantity in records_of(suite, [item])]
    module = suite.paper.module_of(item).__name__
    made_of = [*sources(module), *_registry(suite.paper, item.quantities), suite.path]
    draw = f"{suite.paper.draw_command(item)} --suite {suite.option}" + " > /dev/null" * item.is_table
    recipe = f"@$(eval drawn_{item.name} := 1)$(DO) {draw}"
    show = (
        f"@cat {output}" if item.is_table else f'$(if $(drawn_{item.name}),@:,@echo "figure: $(abspath $<)")'
    )
    return [
        *_rule(output, [*made_of, *records], [recipe]),
        f".PHONY: {item.name}",
        f"{item.name}: {output}",
        f"\t{show}",
    ]


def _page(suite: Suite, page: Page) -> list[str]:
    run, output = page.run(suite), page.path(suite.name)
    command = page.command.format(folder=run.model_folder, page=output)
    return [
        *_rule(output, [run.weights_file, *sources(page.module)], [f"$(DO) {command}"]),
        f".PHONY: {page.name}",
        f"{page.name}: {output}",
        '\t@echo "page: $(abspath $<)"',
    ]


def _cannot(suite: Suite, item: Item) -> list[str]:
    return [f".PHONY: {item.name}", f"{item.name}:", f'\t@echo "error: {why_not(suite, item)}" >&2; exit 2']


def _rule(target: Path, needs: Iterable[Path], recipe: list[str], first: Iterable[Path] = ()) -> list[str]:
    order = " ".join(filter(None, ("$(INSTALLED)", _paths(first))))
    return [f"{target}: {_paths(needs)} | {order}", *(f"\t{line}" for line in recipe)]


def _paths(paths: Iterable[Path]) -> str:
    return " ".join(dict.fromkeys(path.as_posix() for path in paths))


def _names(items: Iterable[Item]) -> str:
    return " ".join(item.name for item in items)


def _report(suite: Suite, usual: list[Item]) -> list[str]:
    """Makes the usual items, and shows all items whose files exist by names that no rule makes (``./``).

    It is also made anew if it links to a page that is gone: no file is newer then.
    """
    there = [f"$(wildcard figures/./{suite.name}/*.{kind})" for kind in ("png", "md")]
    there += [f"$(wildcard figures/./{suite.name}/{page.name}.html)" for page in suite.paper.pages]
    there.append(f"$(wildcard results/./{suite.name}/*/*.csv*)")
    # A page that is asked for in the same call is there by then.
    there += [f"$(if $(filter {page.name},$(CHAIN)),{page.path(suite.name)})" for page in suite.paper.pages]
    report = FIGURES / suite.name / "report.html"
    links = report.read_text(encoding="utf-8") if report.is_file() else ""
    gone = (not page.path(suite.name).is_file() and page.link in links for page in suite.paper.pages)
    made_of = [*sources(REPORT_MODULE), *_judges(suite.paper), suite.path, *[_stale(suite)] * any(gone)]
    needs = [*(item.path(suite.name) for item in usual), *made_of]
    recipe = f"@$(eval drawn_report := 1)$(DO) {REPORT_MODULE} --suite {suite.option}"
    return [f"{report}: {' '.join(there)}", *_rule(report, needs, [recipe])]


def _reproduction() -> list[str]:
    """The Makefile has its recipe; here it depends on every suite and record."""
    judges = [path for name in paper_names() for path in _judges(find_paper(name))]
    return [f"REPRODUCTION.md: {_paths([*sources(REPRODUCTION_MODULE), *judges])}"]


def _registry(paper: Paper, quantities: Iterable[str]) -> list[Path]:
    """The files that define from which runs and records an item is drawn, besides its own module.

    For a quantity these are only the files that describe it, not those that measure it.
    """
    own = [path for name in quantities for path in sources(f"{paper.measures}.{name}", paper.measures)]
    return [*sources(paper_module(paper.name)), *own]


def _judges(paper: Paper) -> list[Path]:
    """The files with a paper's claims and criteria, in its items or elsewhere, and with its models'
    descriptions."""
    modules = [paper.module_of(item).__name__ for item in paper.items]
    modules += [f"{paper.analysis}.{name}" for name in ("text_claims", "models")]
    found = (path for module in dict.fromkeys(modules) for path in sources(module))
    return [*_registry(paper, paper.measured), *found]


def sources(module: str, within: str = "") -> list[Path]:
    """The files under the working folder that a module is made of.

    These are its own file, the files that it imports, and the tables and templates beside them. None for a
    module that does not exist.

    Args:
        within: follow only imports of modules in this package.
    """
    ours = (within,) if within else (*_OURS, module.partition(".")[0])
    found: dict[str, Path] = {}
    waiting = [module, f"{module}.__main__"]  # a package that is run
    while waiting:
        name = waiting.pop()
        if name not in found and (there := _module(name)):
            found[name], imported = there
            waiting += (n for n in imported if f"{n}.".startswith(tuple(f"{package}." for package in ours)))
    data = {
        file for path in found.values() for file in path.parent.iterdir() if file.suffix in _DATA_SUFFIXES
    }
    here = Path.cwd()
    paths = (p.resolve() for p in (*found.values(), *data))
    return sorted(p.relative_to(here) for p in paths if p.is_relative_to(here))


_OURS = ("acp_repro", "analysis")
_DATA_SUFFIXES = {".csv", ".css", ".j2", ".html", ".js"}


@functools.cache
def _module(name: str) -> tuple[Path, tuple[str, ...]] | None:
    """The file of a module, and all that it may import, anywhere in it; None if there is no such module."""
    path = _file(name)
    if path is None:
        return None
    names: list[str] = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names += [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
    return path, tuple(names)


def _file(name: str) -> Path | None:
    """The file of a module. `find_spec` would import its parent packages, and with one of them torch."""
    outer, _, own = name.rpartition(".")
    if not outer:
        spec = importlib.util.find_spec(name)
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
    package = _module(outer)
    if package is None or package[0].name != "__init__.py":
        return None
    folder = package[0].parent
    return next((f for f in (folder / own / "__init__.py", folder / f"{own}.py") if f.is_file()), None)


def items_in_words(suite_name: str) -> str:
    """Every item of the suite's paper with its title, a line each; one line if the items cannot be read."""
    try:
        paper = load_suite(suite_name).paper
        made = [*paper.items, *paper.pages]
    except ImportError:
        return "  make figure2 is one; make setup installs what lists them all"
    return "\n".join([f"  of {paper.title}:", *(f"    make {one.name:<15} {one.title}" for one in made)])


@command()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.chain.rules", description=plain(__doc__.split(": ")[0]) + "."
    )
    parser.add_argument("suite", help="a name in experiments/ or a YAML file")
    parser.add_argument(
        "--items", action="store_true", help="list figures and tables with their titles instead"
    )
    options = parser.parse_args(arguments)
    if options.items:
        print(items_in_words(options.suite))
        return
    suite = load_suite(options.suite)
    state.claim_name(suite)
    files.write_text(_stale(suite), "")
    print(make_rules(suite))


if __name__ == "__main__":
    run_command(main)
