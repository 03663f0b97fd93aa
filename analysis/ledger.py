"""The ledger: every claim of every paper, judged once on the published records, as a row of ``claims.json``.

The pages render these rows. A claim is judged on the runs of its item in every suite with records of the
item. The suite closest to the paper's setting decides, whatever its answer.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from acp_repro.claims import VERSION
from acp_repro.common import files
from acp_repro.common.artifacts import changed_inputs, hash_files, read_object
from acp_repro.common.command import progress_bar
from acp_repro.pipeline import freshness, planner
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.paper import RESULTS, Claim, FigureSpec, Metric, Paper, Suite
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.run import Run
from acp_repro.pipeline.suite_file import load_suite, suite_names

from . import style
from .published import published
from .rerun import rerun
from .tables import UnfitRecords
from .verdict import Verdict, Word

PATH = Path("claims.json")
SHORT = 100  # the largest number of characters of an answer
TEST_COST = "under a minute on two CPU cores"
OWN = "not in the paper"  # begins `paper` of a claim of this project, which is never called reproduced
PRETRAINED = Path("pretrained/results.csv")
HISTORY = Path(__file__).parent / "reproduction"  # tables of criteria and commits, derived from git


@dataclass(frozen=True)
class Row:
    """A claim with its verdict and evidence.

    Attributes:
        id: the argument of ``make claim ID=``, such as "acp.figure2.1".
        where: the figure or table of the claim; empty for a claim of the text.
        paper: the paper's words and their place.
        proof: the proof of a claim that a theorem decides.
        ours: the answer in at most :data:`SHORT` characters; ``numbers`` is the complete answer, one sentence
            per line.
        n, unit: the number and kind of samples that decide.
        suite: the deciding suite; ``scale`` describes its models.
        others: the verdicts of other suites: [suite, verdict, numbers].
        changed: changes of the criterion after scores were seen, as rows of ``changed_criteria.csv``.
        criterion_before_run: whether the criterion's text is older than every record that decides, by the
            commit times of ``criteria.csv`` and ``commits.csv``; None without records.
        records: the files with the judged records.
        commands: the commands that measure the claim again; ``cost`` and ``devices`` are their requirements.
        missing: whether no records exist.
    """

    id: str
    claim: str
    paper: str
    ours: str
    verdict: Word
    where: str = ""
    criterion: str = ""
    proof: str = ""
    n: int | None = None
    unit: str = ""
    numbers: str = ""
    values: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    axis: str = ""
    paper_range: Sequence[float] = ()
    suite: str = ""
    scale: str = ""
    others: Sequence[Sequence[str]] = ()
    changed: Sequence[Mapping[str, str]] = ()
    criterion_before_run: bool | None = None
    test: str = ""
    records: Sequence[str] = ()
    commands: Sequence[str] = ()
    cost: str = "nothing measures it"
    devices: Sequence[str] = ()
    missing: bool = False


@dataclass(frozen=True)
class Finding:
    """The verdict of a claim on one suite."""

    suite: Suite
    verdict: Verdict
    missing: bool = False  # whether no records exist
    runs: Sequence[Run] = ()  # the measured runs
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    item: FigureSpec | None = None  # the item whose runs were judged


def numbered(paper: Paper) -> list[tuple[str, Claim, FigureSpec | None]]:
    """(id, claim, item) of every claim of a paper. Claims of the text are last; their item is None."""
    return [
        (f"{paper.name}.{item.name if item else 'text'}.{number}", claim, item)
        for item, claims in (*((item, item.claims) for item in paper.items), (None, paper.claims))
        for number, claim in enumerate(claims, 1)
    ]


def paper_words(claim: Claim, paper: Paper, item: FigureSpec | None = None) -> str:
    """The paper's words and their place; ``=QUANTITY`` is looked up in the table of published values."""
    if not claim.paper.startswith("="):
        return claim.paper
    of, _, metric = claim.paper[1:].rpartition(".")
    return published(paper.analysis).place(of or item.name, metric)


# --- records ------------------------------------------------------------------------------------------------


def all_records(suite: Suite, names: Container[str] | None = None) -> dict[str, pd.DataFrame]:
    """The records of a suite by metric, of all metrics or of the metrics in ``names``."""
    return {
        metric.name: read_records(suite, metric.name, suite.runs, partial=True)
        for metric in suite.paper.metrics
        if names is None or metric.name in names
        if any(path.is_file() for _, path in record_paths(suite, metric, suite.runs))
    }


def records_of_runs(
    suite: Suite, metrics: Sequence[str], runs: Sequence[Run], records: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """The subset of a suite's records for some metrics and runs; metrics without records are left out."""
    names, found = [run.name for run in runs], {}
    for metric in map(suite.paper.metric, metrics):
        table = records.get(metric.name)
        if table is not None and not metric.command:
            of_runs = table["run"].isin(names) | table["run"].isna()
            table = table[of_runs].reset_index(drop=True)
        if table is not None and len(table):
            found[metric.name] = table
    return found


def record_paths(suite: Suite, metric: Metric, runs: Sequence[Run]) -> list[tuple[str, Path]]:
    """(run, file) of a metric's records; the files need not exist."""
    if metric.command:
        return [(f"suite {suite.name}", metric.path(suite.name))]
    return [(run.name, metric.path(suite.name, run.name)) for run in runs]


# --- judging ------------------------------------------------------------------------------------------------


def judge_claim(claim: Claim, item: FigureSpec, suite: Suite, records: Mapping[str, pd.DataFrame]) -> Finding:
    """Judges a claim on a suite's records of the runs of an item; the finding states which are missing."""
    if not (runs := item.runs(suite)):
        return Finding(suite, Verdict(Word.INCONCLUSIVE, planner.why_not(suite, item)), True)
    tables = records_of_runs(suite, claim.metrics, runs, records)
    if missing := [name for name in suite.paper.required(claim.metrics) if name not in tables]:
        return Finding(suite, Verdict(Word.INCONCLUSIVE, f"no records of {' or '.join(missing)}"), True)
    try:
        verdict = claim.check(*(tables.get(name) for name in claim.metrics))
    except UnfitRecords as error:
        return Finding(suite, Verdict(Word.INCONCLUSIVE, str(error)), True, runs)
    measured = set(verdict.runs) or {run for table in tables.values() for run in table["run"].dropna()}
    found = [run for run in runs if run.name in measured]
    return Finding(suite, verdict, verdict.n == 0, found, tables, item)


def judge_all(only: str | None = None) -> list[Row]:
    """The rows of all claims of the papers with a published suite, or the row of the claim ``only``."""
    suites = [suite for suite in map(load_suite, suite_names()) if suite.file.published]
    if not suites:
        raise SuiteError("no suite in experiments/ has `published: true`; run from the project's folder")
    rows = []
    for name in sorted({suite.paper.name for suite in suites}):
        own = [suite for suite in suites if suite.paper.name == name]
        claims = [one for one in numbered(own[0].paper) if only in (None, one[0])]
        asked = {metric for _, claim, _ in claims for metric in claim.metrics}
        records = {suite.name: all_records(suite, asked) for suite in progress_bar(own, name, leave=False)}
        bar = progress_bar(claims, name, unit="claim", leave=False)
        rows += [judge_row(*one, own[0].paper, own, records) for one in bar]
    return rows


def judge_row(
    id: str,
    claim: Claim,
    item: FigureSpec | None,
    paper: Paper,
    suites: Sequence[Suite],
    records: Mapping[str, Mapping[str, pd.DataFrame]],
) -> Row:
    """The row of a claim, judged on records of ``suites`` or by a test; else the row states the reason."""
    row = Row(
        id,
        claim.claim,
        paper_words(claim, paper, item),
        "",
        Word.INCONCLUSIVE,
        f"{'our ' * item.ours}{item.label}" if item else "",
        claim.holds_if,
        " ".join(claim.proof.split()),
        changed=[change for change in _history("changed_criteria") if change.pop("claim") == id],
        test=claim.test,
    )
    if not claim.metrics:
        return _without_records(row, claim)
    items = [paper.item(name) for name in claim.items] or [item]
    judged_on = [_together(items)] if claim.pooled else items[:1]
    every = [
        judge_claim(claim, one, suite, records[suite.name])
        for suite in suites
        for one in judged_on
        if item or claim.pooled or one.name not in suite.file.skip_items
    ]
    found = [finding for finding in every if not finding.missing]
    if not found:
        unfit = next((finding for finding in every if finding.runs and not item), None)
        return _unmeasured(row, claim, items[0], suites, unfit)
    if claim.pooled:
        return _pooled(row, claim, found)
    first, *_ = found = sorted(found, key=_nearness, reverse=True)
    words = [_word(claim, one.verdict, [one]) for one in found]
    others = [[one.suite.name, word, one.verdict.ours] for one, word in zip(found, words, strict=True)]
    again = rerun([(first.tables, first.item, first.suite, first.runs)])
    return replace(
        _fill(row, replace(first.verdict, word=words[0]), [first]),
        others=[other for other in others if other[1] != words[0]],
        suite=first.suite.name,
        **again,
    )


def _without_records(row: Row, claim: Claim) -> Row:
    """The row of a claim that needs no records: proved, tested, an erratum, or untested."""
    if claim.untested:
        return _fill(row, Verdict(Word.INCONCLUSIVE, claim.untested, claim.short))
    ours = claim.refuted or "the test passes"
    found = claim.check() if claim.check else Verdict(Word.REPRODUCED, ours, claim.short)
    word = Word.ERRATUM if claim.refuted else _word(claim, found, ())
    row = _fill(row, replace(found, word=word))
    commands = [f"python -m pytest -q {claim.test}"] if claim.test else []
    return replace(row, commands=commands, cost=TEST_COST if claim.test else "nothing to measure")


def _together(items: Sequence[FigureSpec]) -> FigureSpec:
    """The first item, with the runs of all items."""
    if len(items) == 1:
        return items[0]
    return replace(
        items[0], runs=lambda suite: [r for r in suite.runs if any(r in one.runs(suite) for one in items)]
    )


def _unmeasured(
    row: Row, claim: Claim, item: FigureSpec, suites: Sequence[Suite], unfit: Finding | None
) -> Row:
    if unfit:
        return replace(_fill(row, replace(unfit.verdict, short="not measured")), missing=True)
    able = next((suite for suite in suites if item.runs(suite)), None)
    lacks = " or ".join(f"`{name}`" for name in claim.metrics)
    if able is None or not set(claim.metrics) <= set(item.metrics):
        what = f"a run of {item.runs_needed}" if able is None else f"records of {lacks} of such a run"
        short = "not measured" if able else "no suite has such a run"
        return replace(_fill(row, Verdict(Word.INCONCLUSIVE, f"no suite has {what}", short)), missing=True)
    why = f"`make {item.name} SUITE={able.name}` runs the measurement {lacks}, which is missing"
    row = _fill(row, Verdict(Word.INCONCLUSIVE, why, "not measured"))
    return replace(row, missing=True, **rerun([(claim.metrics, item, able, item.runs(able))]))


def _pooled(row: Row, claim: Claim, found: Sequence[Finding]) -> Row:
    """The row of a claim that is judged once, on the records of all suites."""
    together = [
        pd.concat(tables) if (tables := [one.tables[name] for one in found if name in one.tables]) else None
        for name in claim.metrics
    ]
    each = [(one.tables, one.item, one.suite, one.runs) for one in found]
    verdict = claim.check(*together)
    return replace(
        _fill(row, replace(verdict, word=_word(claim, verdict, found)), found),
        suite=max(found, key=_nearness).suite.name,
        **rerun(each),
    )


def _word(claim: Claim, verdict: Verdict, found: Sequence[Finding]) -> Word:
    """The verdict of a claim, from the verdict of its criterion.

    A claim is not called reproduced if a theorem or a test decides it, or if the paper does not make it. With
    models trained on less than a tenth of the paper's scale it is reproduced at small scale.
    """
    if verdict.word is not Word.REPRODUCED:
        return verdict.word
    if claim.paper.startswith(OWN):
        return Word.INCONCLUSIVE
    if claim.proof or claim.test:
        return Word.PROVED if claim.proof else Word.TESTED
    trained = any((table["trained_tokens"] > 0).any() for one in found for table in one.tables.values())
    return Word.SMALL_SCALE if trained and not all(map(_at_paper_scale, found)) else Word.REPRODUCED


def _criterion_first(id: str, found: Sequence[Finding]) -> bool | None:
    """Whether the text of a claim's criterion was committed before every record of it was measured."""
    times = {one["commit"]: int(one["time"]) for one in _history("commits")}
    criteria = {one["claim"]: times[one["commit"]] for one in _history("criteria")}
    commits = {commit for one in found for table in one.tables.values() for commit in table["commit"]}
    if not commits:
        return None
    return id in criteria and all(criteria[id] <= times.get(commit, 0) for commit in commits)


def _history(name: str) -> list[dict[str, str]]:
    """The rows of a table of ``analysis/reproduction/``, which scripts/criteria.py derives from git."""
    return _table(HISTORY / f"{name}.csv")


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _fill(row: Row, verdict: Verdict, found: Sequence[Finding] = ()) -> Row:
    short = verdict.short or verdict.ours.partition("\n")[0]
    runs = sum(len(one.runs) for one in found)
    timed = all(_is_timed(table) for one in found for table in one.tables.values())
    files = [
        path.as_posix()
        for one in found
        for name in one.tables
        for _, path in record_paths(one.suite, one.suite.paper.metric(name), one.runs)
        if path.is_file()
    ]
    unit = verdict.unit or ("model" if timed else "training run")
    return replace(
        row,
        ours=short[:1].upper() + short[1:],
        verdict=verdict.word,
        n=verdict.n or runs or None,
        unit=unit if verdict.n or runs else "",
        numbers=verdict.ours,
        values=verdict.values,
        axis=verdict.axis,
        paper_range=list(verdict.paper_range),
        scale=". ".join(dict.fromkeys(map(_scale, found))),
        records=list(dict.fromkeys(files)),
        criterion_before_run=_criterion_first(row.id, found),
    )


def _is_timed(records: pd.DataFrame) -> bool:
    """Whether records are times or rates of a model, and not of a training."""
    times = [name for name in records if name.endswith(("_ms", "_per_s"))]
    return bool(times) and "layer" not in records


def _models(finding: Finding) -> Any:
    return finding.suite.paper.part("naming")


def _at_paper_scale(finding: Finding) -> bool:
    return _models(finding).at_paper_scale(finding.item, finding.runs)


def _nearness(finding: Finding) -> tuple:
    """A sort key that is larger for suites closer to the paper's setting: models that are not undertrained,
    the paper's recipe, its size and context length, then more runs, larger models and more tokens."""
    models = _models(finding)
    settled = getattr(models, "past_start", len)(finding.runs)
    largest = getattr(models, "largest", lambda runs: 0)(finding.runs)
    apart = getattr(models, "distance", lambda item, runs: 0.0)(finding.item, finding.runs)
    tokens = max((table["trained_tokens"].max() for table in finding.tables.values()), default=0)
    recipe = bool(finding.runs) and getattr(models, "has_paper_recipe", lambda runs: False)(finding.runs)
    return settled > 0, recipe, -apart, settled, len(finding.runs), largest, 0 if pd.isna(tokens) else tokens


def _scale(finding: Finding) -> str:
    """ "h100: 125M at 4k, 16k; 100M tokens; NVIDIA H200"."""
    models, parts = _models(finding), []
    if finding.runs:
        at_scale = " (the paper's scale)" if _at_paper_scale(finding) else ""
        start = ", undertrained" * (not getattr(models, "past_start", len)(finding.runs))
        parts.append(models.shapes(finding.runs) + at_scale + start)
    both = pd.concat([table[["trained_tokens", "device"]] for table in finding.tables.values()])
    counts = both["trained_tokens"].dropna()
    tokens = counts[counts > 0]
    weights = ["results without training"] * bool((counts == 0).any())
    if len(tokens):
        epochs = style.epochs(tokens.max(), finding.suite.name)
        weights.insert(0, f"{style.count_span(tokens)} tokens{epochs}")
    parts += [" and ".join(weights), ", ".join(sorted(both["device"].dropna().unique()))]
    return f"{finding.suite.name}: {'; '.join(filter(None, parts))}"


# --- the file -----------------------------------------------------------------------------------------------


def write(rows: Sequence[Row]) -> None:
    """Writes ``claims.json`` with a hash of the records of every judged suite."""
    suites = sorted({Path(path).parts[1] for row in rows for path in row.records})
    usual = {one.name: one.default for one in fields(Row)}
    claims = [
        {key: value for key, value in asdict(row).items() if value not in ([], {}, (), usual[key])}
        for row in rows
    ]
    hashes = {name: _hash_records(name) for name in suites}
    content = {"version": VERSION, "suites": hashes, "claims": claims, "models": models()}
    content["pretrained"] = _table(PRETRAINED) if PRETRAINED.is_file() else []
    files.write_text(PATH, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _content(path: Path = PATH) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def read() -> dict[str, Row]:
    """The rows of ``claims.json`` by ID; empty if the file does not exist."""
    return {row["id"]: Row(**row | {"verdict": Word(row["verdict"])}) for row in _content().get("claims", ())}


def read_models(path: Path = PATH) -> list[dict[str, Any]]:
    return _content(path).get("models", [])


def is_judged(suite: str) -> bool:
    """Whether ``claims.json`` was made from the records that a suite has now."""
    judged = {"inputs": _content().get("suites", {})}
    return not changed_inputs(judged, judged["inputs"] | {suite: _hash_records(suite)})


def _hash_records(suite: str) -> str:
    return hash_files(sorted(RESULTS.glob(f"{suite}/*/*.csv*")))


def models() -> list[dict[str, Any]]:
    """Settings, cost and results of the published training runs of ACP."""
    models = []
    for suite in map(load_suite, suite_names()):
        if not suite.file.published or suite.paper.name != "acp":
            continue
        tables = all_records(suite, ("loss", "pruned_ratio"))
        by_run = {name: dict(list(table.groupby("run"))) for name, table in tables.items()}
        for run in suite.runs:
            trained = freshness.recorded_settings(run).get("trained") or {}
            if not trained and run.name not in by_run.get("loss", {}):
                continue
            one = {"suite": suite.name, "run": run.name, "tokens": run.size.tokens}
            if trained:
                one |= {"gpu_minutes": round(trained["gpu_seconds"] / 60, 1), "device": trained["device"]}
            if (rows := by_run.get("loss", {}).get(run.name)) is not None:
                one |= {"loss_nats": round(float(rows["loss_nats"].iloc[0]), 4)}
                one["commit"] = rows["commit"].iloc[0]
            if (rows := by_run.get("pruned_ratio", {}).get(run.name)) is not None:
                pruned = 100 * rows["pruned_blocks"].sum() / rows["causal_blocks"].sum()
                one |= {"pruned_percent": round(float(pruned), 1), "commit": rows["commit"].iloc[0]}
            models.append(one)
    return models


def run_tests(rows: Sequence[Row]) -> None:
    """Runs the tests of all rows that have one; raises an error if a test fails."""
    tests = list(dict.fromkeys(row.test for row in rows if row.test))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], capture_output=True, text=True)
    if done.returncode:
        raise SuiteError(f"the test of a claim fails:\n{done.stdout[-2000:]}")
