"""Collects the content of a suite's report: claims from the ledger, records and figures.

A paper's analysis has a module ``naming`` that describes its models: ``run_cells(run)``,
``describe(suite)``, and for the ledger ``shapes(runs)``,
``at_paper_scale(item, runs)`` and, where scale matters, ``past_start(runs)``, ``largest(runs)`` and
``distance(item, runs)``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pandas as pd

from acp_repro.pipeline import planner
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import FigureSpec, Suite
from acp_repro.pipeline.suite_file import load_suite

from .. import ledger
from ..ledger import Row, record_paths


@dataclass(frozen=True)
class Entry:
    """The section of an item."""

    item: FigureSpec
    image: Path | None
    text: str | None
    rows: tuple[Row, ...]
    absent: str
    records: tuple[Path, ...]

    @property
    def made(self) -> bool:
        return self.text is not None

    @property
    def shown(self) -> bool:
        """Whether the item has its own section; one section lists the items that the suite cannot draw."""
        return self.made or not self.absent


@dataclass(frozen=True)
class Report:
    """The content of the page: a phrase about the models, a sentence on the verdicts (``note``), the origin
    of the records (``facts``: name, values), one row per run, and the items."""

    suite: Suite
    models: str
    note: str
    facts: tuple[tuple[str, str], ...]
    runs: pd.DataFrame
    entries: tuple[Entry, ...]
    left_out: tuple[FigureSpec, ...]


def gather(name: str) -> Report:
    """The report of a suite."""
    suite = load_suite(name)
    records = ledger.all_records(suite)
    of_runs = {n: table for n, table in records.items() if not suite.paper.metric(n).command}
    if not records:
        raise RecordError(
            f"no records in results/{suite.name}; make them with `make records SUITE={suite.option}`"
        )
    models = suite.paper.part("naming")
    rows, note = _rows(suite, records)
    entries = [entry(item, suite, rows) for item in suite.paper.items]
    shown = tuple(e for e in entries if e.made or planner.is_usual(suite, e.item))
    return Report(
        suite,
        models.describe(suite) if of_runs else "",
        note,
        facts(records),
        runs_table(suite, of_runs, models),
        shown,
        tuple(e.item for e in entries if e not in shown and not e.absent),
    )


def _rows(suite: Suite, records: Mapping[str, pd.DataFrame]) -> tuple[dict[str, Row], str]:
    """The rows of ``claims.json`` for a published suite, else the rows judged on this suite alone; also the
    note of the report."""
    if suite.file.published and (rows := ledger.read()):
        if ledger.is_judged(suite.name):
            return rows, "The verdicts are those of [claims.json](../../claims.json) on all published suites."
        return rows, "The results are newer than claims.json. `make reproduction` judges the new results."
    return {
        id: ledger.judge_row(id, claim, item, suite.paper, [suite], {suite.name: records})
        for id, claim, item in ledger.numbered(suite.paper)
        if item
    }, ""


def entry(item: FigureSpec, suite: Suite, rows: Mapping[str, Row]) -> Entry:
    """The section of one item."""
    runs, found = item.runs(suite), []
    for metric in map(suite.paper.metric, item.metrics):
        paths = [path for _, path in record_paths(suite, metric, item.runs_with(suite, metric))]
        found += filter(Path.is_file, paths)
    main = item.path(suite.name)
    image, text = main.with_suffix(".png"), main.with_suffix(".md")
    of_item = f"{suite.paper.name}.{item.name}."
    return Entry(
        item,
        image if image.is_file() else None,
        text.read_text(encoding="utf-8") if text.is_file() else None,
        tuple(row for id, row in rows.items() if runs and id.startswith(of_item)),
        "" if runs else planner.why_not(suite, item).removeprefix(f"{item.name}: "),
        tuple(found),
    )


def facts(records: Mapping[str, pd.DataFrame]) -> tuple[tuple[str, str], ...]:
    """The origin of the records: (name, all values that occur)."""

    def values(column: str) -> str:
        found = {str(v) for table in records.values() for v in table[column].dropna().unique()}
        return ", ".join(sorted(found)) or "none"

    versions = [
        ("torch", "torch_version"),
        ("triton", "triton_version"),
        ("ptxas", "ptxas_version"),
        ("Python", "python_version"),
    ]
    return (
        ("Devices", values("device")),
        ("Number formats", values("dtype")),
        ("Versions", "; ".join(f"{n} {values(c)}" for n, c in versions if values(c) != "none")),
        ("Commits", values("commit")),
    )


def runs_table(suite: Suite, records: Mapping[str, pd.DataFrame], models: ModuleType) -> pd.DataFrame:
    """One row per run of the suite: its settings, trained tokens and number of measured metrics."""
    trained: dict[str, int] = {}
    measured: dict[str, int] = {}
    for table in records.values():
        for run, tokens in table.groupby("run")["trained_tokens"].max().items():
            trained[run] = max(trained.get(run, 0), int(tokens))
            measured[run] = measured.get(run, 0) + 1
    return pd.DataFrame(
        {
            "run": run.name,
            **models.run_cells(run),
            "trained tokens": _tokens(trained.get(run.name)),
            "metrics": str(measured.get(run.name, 0)),
        }
        for run in suite.runs
    )


def _tokens(trained: int | None) -> str:
    if trained is None:
        return "not measured"
    return f"{trained:,}" if trained else "untrained"
