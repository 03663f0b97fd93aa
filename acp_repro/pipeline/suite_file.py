"""A suite: one YAML file that sets at what scale a paper is run (``experiments/NAME.yaml``).

The file contains only deviations from the paper's settings, which are the defaults. Loading is strict: an
unknown key, a wrong type or an invalid value raises a one-line error with file, key and the fix. The grid is
multiplied out here, so paired runs differ in one key. This module needs no torch.
"""

import contextlib
import fnmatch
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import SuiteError, UnknownName
from .paper import Paper, Suite
from .paper_registry import find_paper
from .run import EXPERIMENTS, Run, Strict, SuiteName, WeightsConfig
from .strict_yaml import build, parse_yaml

DEFAULT_PAPER = "acp"
# Suites and runs name folders, and targets of Make.
MOST_RUNS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True, kw_only=True)
class SuiteFile(Strict):
    """The keys at the top of every suite file; a paper's own class adds ``grid`` and its other keys.

    Attributes:
        description: one line about the suite, for its report.
        paper: the paper whose keys the file has: ``acp``, ``lap`` or ``retention``.
        skip_items: figures and tables that ``make all`` skips.
        published: whether the results are committed. True: they count in REPRODUCTION.md. False:
            REPRODUCTION.md lists the suite as missing. Null: each user runs the suite.
        skip_runs: names of runs of the grid, or patterns such as ``"*-seed1"``, that are not trained. No item
            needs them.
    """

    description: str
    paper: str = DEFAULT_PAPER
    weights: WeightsConfig | None = None
    skip_items: list[str] = field(default_factory=list)
    published: bool | None = None
    skip_runs: list[str] = field(default_factory=list)


def suite_path(name: str) -> Path:
    """The file of a suite: ``experiments/NAME.yaml``, or ``name`` itself if it ends in ``.yaml`` or ``.yml``,
    contains a slash, or is a folder."""
    path, named = Path(name), EXPERIMENTS / f"{name}.yaml"
    is_path = path.suffix in (".yaml", ".yml") or "/" in name or (path.is_dir() and not named.is_file())
    return path if is_path else named


def suite_names() -> list[str]:
    """The suites of ``experiments/``."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """The suite of that name or path (:func:`suite_path`), validated and multiplied out."""
    path = suite_path(name)
    if not path.is_file():
        there = f"experiments/ has {', '.join(suite_names()) or 'none'}; run from the project's folder"
        raise SuiteError(f"{path}: {'a folder, not a' if path.is_dir() else 'no such'} suite; {there}")
    if not _NAME.fullmatch(path.stem):
        raise SuiteError(f"{path}: a suite's name may have only letters, digits and ._+-; rename the file")
    content = parse_yaml(path.read_bytes(), path)
    with _errors_in(path):
        paper = find_paper(str(content.get("paper", DEFAULT_PAPER)))
    file = build(paper.file, content, path)
    with _errors_in(path):
        suite = _multiply_out(paper, file, SuiteName(path.stem, path))
        for item in file.skip_items:
            paper.item(item)
        suite.check()
    return suite


@contextlib.contextmanager
def _errors_in(path: Path) -> Iterator[None]:
    """Names the file in an error about its content."""
    try:
        yield
    except ValueError as error:
        raise SuiteError(f"{path}: {error}") from None


def _multiply_out(paper: Paper, file: SuiteFile, suite: SuiteName) -> Suite:
    """The suite with a run for each point of its grids; ValueError begins with the key."""
    grids = [{axis.name: getattr(grid, axis.name) for axis in fields(grid)} for grid in file.grid]
    if (count := sum(math.prod(map(len, grid.values())) for grid in grids)) > MOST_RUNS:
        raise ValueError(f"grid: makes {count:,} runs; at most {MOST_RUNS:,} are supported")
    runs: dict[str, Run] = {}
    for index, grid in enumerate(grids):
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            run = paper.make_run(file, suite, f"grid[{index}]", **point)
            if not _NAME.fullmatch(run.name):
                raise ValueError(
                    f"grid[{index}]: a run cannot be named {run.name!r}; use letters, digits and ._+- alone"
                )
            if runs.setdefault(run.name, run) is not run:
                raise ValueError(f"grid[{index}]: makes the run {run.name} a second time")
    gaps: set[str] = set()
    for pattern in file.skip_runs:
        if not (found := fnmatch.filter(runs, pattern)):
            raise UnknownName.among("skip_runs: the grid has no such run", pattern, runs)
        gaps.update(found)
    there = tuple(run for name, run in runs.items() if name not in gaps)
    if not there:
        raise ValueError(f"grid: has no run{' but those of skip_runs' if runs else ''}; add one")
    return paper.suite(suite, paper, file, there, tuple(runs[name] for name in runs if name in gaps))
