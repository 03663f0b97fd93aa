"""One page with every figure and table of a suite, and the paper's claims checked against its records.

    python -m analysis.report --suite cpu        # writes figures/cpu/report.html

What is not measured or not drawn is listed with the command that makes it. The page is one file without
a reference to the network; only the links to records need the folders beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from acp_repro.records import QUANTITIES, RecordError, path_of, read_records

from acp_repro.suite import Run, SizeConfig, Suite, SuiteError, load_suite

from . import style
from .criteria import Criterion
from .report_items import ITEMS, Item

MET, MISSED, UNDECIDED, MISSING, ABSENT = ("met", "not met", "undecided", "not measured", "not in suite")


@dataclass(frozen=True)
class Judgement:
    criterion: Criterion
    status: str  # one of the five above
    ours: str  # our numbers, or why there are none


@dataclass(frozen=True)
class Entry:
    """A section of the page."""

    item: Item
    image: Path | None  # None: not drawn
    text: str | None  # caption, and the table of a table, in Markdown; None: not made
    judgements: tuple[Judgement, ...]
    scale: str  # ours beside the paper's, in words; empty where it does not matter
    absent: str  # why the suite cannot have it; empty where it can
    records: tuple[Path, ...]
    unmeasured: tuple[str, ...]  # "RUN: quantity, quantity" that are still to be made


@dataclass(frozen=True)
class Report:
    suite: Suite
    facts: tuple[tuple[str, str], ...]
    runs: pd.DataFrame  # what was trained, as text
    entries: tuple[Entry, ...]


def gather(name: str) -> Report:
    """Everything that the page of a suite shows.

    Raises:
        SuiteError: there is no such suite.
        RecordError: nothing of it is measured.
    """
    suite = load_suite(name)
    records = {}
    for quantity in QUANTITIES:
        # The reader's own error is right for one figure; here other quantities may be there.
        if any((path_of(suite.name, run.name, quantity)).is_file() for run in suite.runs):
            records[quantity] = read_records(suite.name, quantity)
    if not records:
        raise RecordError(
            f"no records in results/{suite.name}; make them with `make records SUITE={suite.name}`"
        )
    entries = tuple(_entry(item, suite, records) for item in ITEMS)
    return Report(suite, facts(records), runs_table(suite, records), entries)


def _entry(item: Item, suite: Suite, records: Mapping[str, pd.DataFrame]) -> Entry:
    runs = item.runs(suite)
    of_item, found, unmeasured = {}, [], {}
    for quantity in item.quantities:
        table = records.get(quantity)
        have = set() if table is None else set(table["run"])
        for run in runs:
            if run.name in have:
                found.append(path_of(suite.name, run.name, quantity))
            else:
                unmeasured.setdefault(run.name, []).append(quantity)
        if table is not None and (mine := table["run"].isin([run.name for run in runs])).any():
            of_item[quantity] = table[mine].reset_index(drop=True)
    folder = style.FIGURES / suite.name
    image, text = folder / f"{item.name}.png", folder / f"{item.name}.md"
    absent = ""
    if not runs:
        absent = f"the grid of experiments/{suite.name}.yaml has no run of {item.needs}"
    return Entry(
        item,
        image if image.is_file() else None,
        text.read_text() if text.is_file() else None,
        tuple(judge(criterion, of_item, absent) for criterion in item.claims),
        scale_in_words(item, runs) if item.paper_model and runs else "",
        absent,
        tuple(found),
        tuple(f"{run}: {', '.join(quantities)}" for run, quantities in unmeasured.items()),
    )


def judge(criterion: Criterion, records: Mapping[str, pd.DataFrame], absent: str = "") -> Judgement:
    """The criterion on records of the runs of its figure; missing records are said, not guessed."""
    if absent:
        return Judgement(criterion, ABSENT, absent)
    missing = [q for q in criterion.quantities if q not in records]
    if missing:
        return Judgement(criterion, MISSING, f"no records of {' or '.join(missing)}")
    try:
        verdict = criterion.judge(records)
    except ValueError as error:
        return Judgement(criterion, MISSING, str(error))
    status = {True: MET, False: MISSED, None: UNDECIDED}[verdict.met]
    return Judgement(criterion, status, verdict.ours)


def scale_in_words(item: Item, runs: list[Run]) -> str:
    """Ours beside the paper's: parameters, training and context, with the factors between them."""
    name, length = item.paper_model
    settings = style.paper_values().query("item == 'table2' and size == @name")
    settings = settings.set_index("quantity")["low"]
    paper = SizeConfig(
        int(settings["num_hidden_layers"]),
        int(settings["hidden_size"]),
        int(1e9 * settings["tokens"]),
        settings["learning_rate"],
    )
    largest = max(runs, key=lambda run: run.size.non_embedding)
    longest = max(run.context_length for run in runs)
    ours = largest.size
    return (
        f"Largest size here: {largest.size_name}, {style.count_label(ours.tokens)} training tokens, "
        f"contexts of {style.length_label(longest)}; in the paper {name}, "
        f"{style.count_label(paper.tokens)} and {style.length_label(length)}. The paper's model is "
        f"{_times(paper.non_embedding / ours.non_embedding)}as large, saw "
        f"{_times(paper.tokens / ours.tokens)}as many tokens and contexts "
        f"{_times(length / longest)}as long."
    )


def _times(factor: float) -> str:
    """2063.3 -> "2,100 times "; nothing where both are about the same."""
    if 0.9 < factor < 1.1:
        return ""
    digits = float(f"{factor:.2g}")
    return f"{digits:,.0f} times " if digits >= 10 else f"{digits:g} times "


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


def runs_table(suite: Suite, records: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row a run of the suite: what it is, how long it was trained, how much of it is measured."""
    trained: dict[str, int] = {}
    measured: dict[str, int] = {}
    for table in records.values():
        for run, tokens in table.groupby("run")["trained_tokens"].max().items():
            trained[run] = int(tokens)
            measured[run] = measured.get(run, 0) + 1
    return pd.DataFrame(
        {
            "run": run.name,
            "architecture": style.ARCHITECTURES[run.architecture],
            "size": run.size_name,
            "context": style.length_label(run.context_length),
            "log epsilon": "exact" if (e := run.log_pruning_tolerance) is None else f"{e:g}",
            "seed": str(run.seed),
            "trained tokens": f"{trained[run.name]:,}" if run.name in trained else "not measured",
            "quantities": str(measured.get(run.name, 0)),
        }
        for run in suite.runs
    )


def main() -> None:
    from .report_page import render

    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", default="cpu", help="whose records to show (default: cpu)")
    try:
        report = gather(parser.parse_args().suite)
    except (RecordError, SuiteError) as error:
        sys.exit(f"error: {error}")
    path = style.FIGURES / report.suite.name / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report), encoding="utf-8")
    print(f"report: {path.resolve()}")


if __name__ == "__main__":
    main()
