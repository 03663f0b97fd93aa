"""Everything that the report of a suite shows, from its paper's registry, its records and its figures.

A paper's analysis may have a module ``models`` that describes its models: ``run_cells(run)``,
``describe(suite)``, ``caveat(suite)``, ``scale(item, runs)``, and for REPRODUCTION.md ``shapes(runs)`` and
``at_paper_scale(item, runs)`` and, if training has a start that says little, ``past_start(runs)``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd

from acp_repro.pipeline import plan
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import Claim, Item, Paper, Quantity, Suite
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.run import Run
from acp_repro.pipeline.suite import load_suite

from ..published import published
from ..tables import UnfitRecords
from ..verdict import Status
from .entries import Entry, Judgement, Report


def gather(name: str) -> Report:
    """The report of a suite.

    Raises:
        SuiteError: there is no such suite.
        RecordError: nothing of it is measured.
    """
    suite = load_suite(name)
    records = all_records(suite)
    of_runs = {n: table for n, table in records.items() if not suite.paper.quantity(n).command}
    if not records:
        raise RecordError(
            f"no records in results/{suite.name}; make them with `make records SUITE={suite.option}`"
        )
    models = suite.paper.part("models")
    entries = [entry(item, suite, records, models) for item in suite.paper.items]
    shown = tuple(e for e in entries if e.made or plan.is_usual(suite, e.item))
    return Report(
        suite,
        models.describe(suite) if models and of_runs else "",
        models.caveat(suite) if models and of_runs else "",
        facts(records),
        runs_table(suite, of_runs, models),
        shown,
        tuple(e.item for e in entries if e not in shown and not e.absent),
        tuple(page for page in suite.paper.pages if page.path(suite.name).is_file()),
    )


def all_records(suite: Suite, names: Container[str] | None = None) -> dict[str, pd.DataFrame]:
    """What is measured of a suite, by quantity: of all, or of ``names``."""
    records = {}
    for quantity in suite.paper.quantities:
        if names is not None and quantity.name not in names:
            continue
        if any(path.is_file() for _, path in record_paths(suite, quantity, suite.runs)):
            records[quantity.name] = read_records(suite, quantity.name, suite.runs, partial=True)
    return records


def of_item(item: Item, suite: Suite, records: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Those of a suite's records that an item is drawn from: of its quantities and its runs."""
    names = [run.name for run in item.runs(suite)]
    found = {}
    for quantity in map(suite.paper.quantity, item.quantities):
        table = records.get(quantity.name)
        if table is not None and not quantity.command:
            table = table[table["run"].isin(names)].reset_index(drop=True)
        if table is not None and len(table):
            found[quantity.name] = table
    return found


def entry(item: Item, suite: Suite, records: Mapping[str, pd.DataFrame], models: ModuleType | None) -> Entry:
    """The section of one item."""
    runs = item.runs(suite)
    files, unmeasured = [], {}
    for quantity in map(suite.paper.quantity, item.quantities):
        for run, path in record_paths(suite, quantity, item.runs_with(suite, quantity)):
            if path.is_file():
                files.append(path)
            else:
                unmeasured.setdefault(run, []).append(quantity.name)
    found = of_item(item, suite, records)
    main = item.path(suite.name)
    image, text = main.with_suffix(".png"), main.with_suffix(".md")
    absent = "" if runs else plan.why_not(suite, item).removeprefix(f"{item.name}: ")
    return Entry(
        item,
        image if image.is_file() else None,
        text.read_text(encoding="utf-8") if text.is_file() else None,
        tuple(judge(claim, item, suite, found, absent) for claim in item.claims),
        models.scale(item, runs) if models else "",
        absent,
        tuple(files),
        tuple(f"{run}: {', '.join(quantities)}" for run, quantities in unmeasured.items()),
        tuple(_steps(item, suite)),
    )


def record_paths(suite: Suite, quantity: Quantity, runs: Sequence[Run]) -> list[tuple[str, Path]]:
    """(run, file) of a quantity's records, whether they are there or not."""
    if quantity.command:
        return [(f"suite {suite.name}", quantity.path(suite.name))]
    return [(run.name, quantity.path(suite.name, run.name)) for run in runs]


def _steps(item: Item, suite: Suite) -> list[str]:
    quantities = [suite.paper.quantity(name) for name in item.quantities]
    measured = [quantity.name for quantity in quantities if not quantity.command]
    steps = [f"python -m acp_repro.measure {' '.join(measured)} --suite {suite.option}"] if measured else []
    steps += [quantity.command_for(suite.name) for quantity in quantities if quantity.command]
    return [*steps, f"python -m analysis {item.name} --suite {suite.option}"]


def judge(
    claim: Claim, item: Item, suite: Suite, records: Mapping[str, pd.DataFrame], absent: str = ""
) -> Judgement:
    """A claim on records of the runs of its item; missing records are said, not guessed."""
    words = paper_words(claim, suite.paper, item)
    if absent:
        return Judgement(claim, words, Status.ABSENT, absent)
    missing = [name for name in suite.paper.required(claim.quantities) if name not in records]
    if missing:
        return Judgement(claim, words, Status.MISSING, f"no records of {' or '.join(missing)}")
    try:
        verdict = claim.check(*(records.get(name) for name in claim.quantities))
    except UnfitRecords as error:
        return Judgement(claim, words, Status.MISSING, str(error))
    return Judgement(claim, words, verdict.status, verdict.ours)


def paper_words(claim: Claim, paper: Paper, item: Item | None = None) -> str:
    """What the paper says and where; ``=QUANTITY`` is looked up in the table of its values."""
    if not claim.paper.startswith("="):
        return claim.paper
    of, _, quantity = claim.paper[1:].rpartition(".")
    return published(paper.analysis).place(of or item.name, quantity)


def facts(records: Mapping[str, pd.DataFrame]) -> tuple[tuple[str, str], ...]:
    """Where the records come from: (name, all values that occur)."""

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
        ("Device", values("device")),
        ("Number format", values("dtype")),
        ("Versions", "; ".join(f"{n} {values(c)}" for n, c in versions if values(c) != "none")),
        ("Commit", values("commit")),
    )


def runs_table(
    suite: Suite, records: Mapping[str, pd.DataFrame], models: ModuleType | None = None
) -> pd.DataFrame:
    """One row per run of the suite: what it is, how long it was trained, how many quantities are measured."""
    trained: dict[str, int] = {}
    measured: dict[str, int] = {}
    for table in records.values():
        for run, tokens in table.groupby("run")["trained_tokens"].max().items():
            trained[run] = max(trained.get(run, 0), int(tokens))
            measured[run] = measured.get(run, 0) + 1
    return pd.DataFrame(
        {
            "run": run.name,
            **(models.run_cells(run) if models else _cells(run)),
            "trained tokens": _tokens(trained.get(run.name)),
            "quantities": str(measured.get(run.name, 0)),
        }
        for run in suite.runs
    )


def _tokens(trained: int | None) -> str:
    if trained is None:
        return "not measured"
    return f"{trained:,}" if trained else "fresh weights"


def _cells(run: Run) -> dict[str, str]:
    return {
        name.replace("_", " "): "none" if value is None else str(value)
        for name, value in run.columns().items()
    }
