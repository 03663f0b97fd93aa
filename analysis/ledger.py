"""The ledger: every claim of every paper, judged once on the published records, a row of ``claims.json``.

The pages render these rows. A claim is judged on the runs of its item in every suite that has records of it;
the suite nearest to the paper's own setting decides, whatever its answer.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from acp_repro.claims import VERSION
from acp_repro.common import files
from acp_repro.common.artifacts import read_object
from acp_repro.common.command import progress_bar
from acp_repro.pipeline import freshness, planner
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.paper import RESULTS, Claim, FigureSpec, Metric, Paper, Suite
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.run import Run
from acp_repro.pipeline.suite_file import load_suite, suite_names

from . import style
from .published import published
from .tables import UnfitRecords
from .verdict import Verdict, Word

PATH = Path("claims.json")
REFERENCE = Path("reference/results")  # of the small suites; the planner does not read it
SHORT = 60  # characters of an answer
TEST_COST = "under a minute on two CPU cores"
OWN = "not in the paper"  # begins the `paper` of a claim of this project, which reproduces nothing
PRETRAINED = Path("pretrained/results.csv")
HISTORY = Path(__file__).parent / "reproduction"  # what git knows of criteria, as data


@dataclass(frozen=True)
class Row:
    """A claim and what became of it.

    Attributes:
        id: what ``make claim ID=`` takes, such as "acp.figure2.1".
        where: the figure or table whose claim it is; empty for one of the text.
        paper: the paper's words and their place.
        ours: the answer in at most :data:`SHORT` characters; ``numbers`` has all of it.
        n, unit: how many of what the verdict rests on.
        suite: the one that decides; ``scale`` describes its models.
        others: what other suites found: [suite, verdict, numbers].
        changed: each change of the criterion after scores were seen, a row of ``changed_criteria.csv``.
        criterion_before_run: whether the criterion's text is older than every record that decides, by the
            commit times of ``criteria.csv`` and ``commits.csv``; None without records.
        records: the files behind it.
        commands: what measures it again; ``cost`` and ``devices`` say what that takes.
        missing: whether there is nothing to judge.
    """

    id: str
    claim: str
    paper: str
    ours: str
    verdict: Word
    where: str = ""
    criterion: str = ""
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
    """What one suite shows of a claim."""

    suite: Suite
    verdict: Verdict
    missing: bool = False  # there was nothing to judge
    runs: Sequence[Run] = ()  # that were measured
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    item: FigureSpec | None = None  # on whose runs it was judged


def numbered(paper: Paper) -> list[tuple[str, Claim, FigureSpec | None]]:
    """(id, claim, item) of every claim of a paper, those of its text last, with no item."""
    return [
        (f"{paper.name}.{item.name if item else 'text'}.{number}", claim, item)
        for item, claims in (*((item, item.claims) for item in paper.items), (None, paper.claims))
        for number, claim in enumerate(claims, 1)
    ]


def paper_words(claim: Claim, paper: Paper, item: FigureSpec | None = None) -> str:
    """What the paper says and where; ``=QUANTITY`` is looked up in the table of its values."""
    if not claim.paper.startswith("="):
        return claim.paper
    of, _, metric = claim.paper[1:].rpartition(".")
    return published(paper.analysis).place(of or item.name, metric)


# --- records ------------------------------------------------------------------------------------------------


def all_records(suite: Suite, names: Container[str] | None = None) -> dict[str, pd.DataFrame]:
    """What is measured of a suite, by metric: of all, or of ``names``."""
    return {
        metric.name: read_records(suite, metric.name, suite.runs, partial=True)
        for metric in suite.paper.metrics
        if names is None or metric.name in names
        if any(path.is_file() for _, path in record_paths(suite, metric, suite.runs))
    }


def records_of_runs(
    suite: Suite, metrics: Sequence[str], runs: Sequence[Run], records: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """Those of a suite's records that are of some metrics and runs."""
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
    """(run, file) of a metric's records, whether they are there or not."""
    if metric.command:
        return [(f"suite {suite.name}", metric.path(suite.name))]
    return [(run.name, metric.path(suite.name, run.name)) for run in runs]


def digest(suite: str) -> str:
    """Of all records of a suite, as they are now."""
    lines = [f"{path} {files.sha256_of(path)}\n" for path in sorted(RESULTS.glob(f"{suite}/*/*.csv*"))]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# --- judging ------------------------------------------------------------------------------------------------


def judge_claim(claim: Claim, item: FigureSpec, suite: Suite, records: Mapping[str, pd.DataFrame]) -> Finding:
    """A claim on a suite's records of the runs of an item; missing records are said, not guessed."""
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
    """The rows of every claim of the papers that have a published suite, or of the claim ``only``."""
    suites = [suite for suite in map(load_suite, suite_names()) if suite.file.published]
    if not suites:
        raise SuiteError("no suite in experiments/ says `published: true`")
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
    """The row of a claim: on records, by a test, or not at all."""
    row = Row(
        id,
        claim.claim,
        paper_words(claim, paper, item),
        "",
        Word.INCONCLUSIVE,
        f"{item.label}{', ours' * item.ours}" if item else "",
        claim.holds_if,
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
    again = _rerun(first.tables, first.item, first.suite, first.runs)
    return replace(
        _fill(row, replace(first.verdict, word=words[0]), [first]),
        others=[other for other in others if other[1] != words[0]],
        suite=first.suite.name,
        **again,
    )


def _without_records(row: Row, claim: Claim) -> Row:
    """Proved, tested, wrong as printed, or not to be judged here."""
    if claim.untested:
        return _fill(row, Verdict(Word.INCONCLUSIVE, claim.untested, claim.short))
    ours = claim.refuted or claim.proof or "the test passes"
    found = claim.check() if claim.check else Verdict(Word.REPRODUCED, ours, claim.short)
    word = Word.ERRATUM if claim.refuted else _word(claim, found, ())
    row = _fill(row, replace(found, word=word))
    commands = [f"python -m pytest -q {claim.test}"] if claim.test else []
    cost = TEST_COST if claim.test else "nothing to measure"
    return replace(row, commands=commands, cost=cost)


def _together(items: Sequence[FigureSpec]) -> FigureSpec:
    """The runs of all, as those of the first."""
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
    why = f"no records of {lacks}; `make {item.name} SUITE={able.name}` makes them"
    row = _fill(row, Verdict(Word.INCONCLUSIVE, why, "not measured"))
    return replace(row, missing=True, **_rerun(claim.metrics, item, able, item.runs(able)))


def _pooled(row: Row, claim: Claim, found: Sequence[Finding]) -> Row:
    """Judged once, on the records of all suites."""
    together = [
        pd.concat(tables) if (tables := [one.tables[name] for one in found if name in one.tables]) else None
        for name in claim.metrics
    ]
    each = [_work(one.tables, one.item, one.suite, one.runs) for one in found]
    verdict = claim.check(*together)
    return replace(
        _fill(row, replace(verdict, word=_word(claim, verdict, found)), found),
        suite=max(found, key=_nearness).suite.name,
        **_costs(each),
    )


def _word(claim: Claim, verdict: Verdict, found: Sequence[Finding]) -> Word:
    """The word of a criterion that holds: what a theorem or a test decides, or the paper does not claim, is
    not called reproduced, and what was trained on less than a tenth of the paper's scale is reproduced at
    small scale."""
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
    short = verdict.short or verdict.ours
    if len(short) > SHORT:
        short = f"{short[: SHORT - 2].rstrip()} …"
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
        ours=short,
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
    """More for a suite that is nearer to the paper's setting: past the undertrained stage, with the paper's
    recipe, at its size and context; then with more shapes and runs, larger models and more tokens."""
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
    weights = ["fresh weights"] * bool((counts == 0).any())
    if len(tokens):
        epochs = style.epochs(tokens.max(), finding.suite.name)
        weights.insert(0, f"{style.count_span(tokens)} tokens{epochs}")
    parts += [" and ".join(weights), ", ".join(sorted(both["device"].dropna().unique()))]
    return f"{finding.suite.name}: {'; '.join(filter(None, parts))}"


# --- measuring again ----------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """What trains and measures some metrics of runs."""

    commands: Sequence[str]
    training: Sequence[float | None]  # GPU seconds of each run, None if not recorded
    measuring: Sequence[float | None]  # seconds of each record
    devices: Sequence[str]


def _rerun(names: Iterable[str], item: FigureSpec, suite: Suite, runs: Sequence[Run]) -> dict[str, Any]:
    """What trains and measures some metrics of ``runs``, and the cost: fields of a row."""
    return _costs([_work(names, item, suite, runs)])


def _costs(each: Sequence[_Work]) -> dict[str, Any]:
    training = [seconds for one in each for seconds in one.training]
    measuring = [seconds for one in each for seconds in one.measuring]
    devices = sorted({device for one in each for device in one.devices})
    machines = " and ".join("an " + re.sub(r"NVIDIA (\S+).*", r"\1", name) for name in devices)
    commands = list(dict.fromkeys(command for one in each for command in one.commands))
    trains = _time(training, "training", f" on {machines or 'one machine'}") if training else "no training"
    measures = _time(measuring, "measuring")
    return {"commands": commands, "cost": f"{trains}, {measures}", "devices": devices}


def _work(names: Iterable[str], item: FigureSpec, suite: Suite, runs: Sequence[Run]) -> _Work:
    metrics = [suite.paper.metric(name) for name in names]
    commands = [metric.command_for(suite.name) for metric in metrics if metric.command]
    of_runs = [metric for metric in metrics if not metric.command]
    pairs = [(run, q) for q in of_runs for run in item.runs_with(suite, q) if run in runs]
    trained = {run for run, metric in pairs if not metric.untrained(run)} if not suite.weights else set()
    while first := {needed for run in trained for needed in suite.prerequisites(run)} - trained:
        trained |= first
    if trained:
        commands.append(planner.train_command(suite, [run for run in suite.runs if run in trained]))
    commands += [f"{command} --force" for command in planner.measure_commands(suite, pairs)]
    known = [_recorded(run).get("trained") or {} for run in trained]
    records = [(_recorded(run).get("records", {}), metric.path(suite.name).name) for run, metric in pairs]
    measuring = [None for metric in metrics if metric.command]
    measuring += [found.get(name, {}).get("seconds") for found, name in records]
    seconds = [one.get("gpu_seconds") for one in known]
    return _Work(commands, seconds, measuring, sorted({one["device"] for one in known if one}))


def _recorded(run: Run) -> dict[str, Any]:
    """The ``settings.json`` of a run's results, or else of its reference results."""
    found = freshness.recorded_settings(run)
    return found or files.read_json(REFERENCE / run.suite / run.name / freshness.PROOFS)


def _time(seconds: Sequence[float | None], what: str, where: str = "") -> str:
    """ "about 3 min of training on an H200 (1 of 4 times not recorded)"."""
    known = [one for one in seconds if one is not None]
    if not known:
        return f"{what} time not recorded"
    unknown = f" ({len(seconds) - len(known)} of {len(seconds)} times not recorded)"
    return f"{duration(sum(known))} of {what}{where}" + unknown * (len(known) < len(seconds))


def duration(seconds: float) -> str:
    """ "about 1 h 33 min"; under a minute in seconds."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"about {max(seconds, 1):.0f} s"
    return "about " + f"{minutes // 60} h {minutes % 60} min".removeprefix("0 h ").removesuffix(" 0 min")


def judge_on(
    id: str, claim: Claim, item: FigureSpec | None, suite: Suite, records: Mapping[str, pd.DataFrame]
) -> Row:
    """The row of a claim as one suite alone decides it, by ``records``."""
    return judge_row(id, claim, item, suite.paper, [suite], {suite.name: records})


def rerun_on(claim: Claim, item: FigureSpec, suite: Suite) -> dict[str, Any]:
    """As the row has it, but on all runs that a suite has for it."""
    return _rerun(suite.paper.required(claim.metrics), item, suite, item.runs(suite))


# --- the file -----------------------------------------------------------------------------------------------


def write(rows: Sequence[Row]) -> None:
    """Writes ``claims.json``, with a hash of the records of every suite that was judged."""
    suites = sorted({Path(path).parts[1] for row in rows for path in row.records})
    usual = {one.name: one.default for one in fields(Row)}
    claims = [
        {key: value for key, value in asdict(row).items() if value not in ([], {}, (), usual[key])}
        for row in rows
    ]
    digests = {name: digest(name) for name in suites}
    content = {"version": VERSION, "suites": digests, "claims": claims, "models": models()}
    content["pretrained"] = _table(PRETRAINED) if PRETRAINED.is_file() else []
    files.write_text(PATH, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _content(path: Path = PATH) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def read() -> dict[str, Row]:
    """The rows of ``claims.json`` by their ID; none where that file is missing or damaged."""
    claims = _content().get("claims", ())
    return {row["id"]: Row(**row | {"verdict": Word(row["verdict"])}) for row in claims}


def read_models(path: Path = PATH) -> list[dict[str, Any]]:
    return _content(path).get("models", [])


def is_judged(suite: str) -> bool:
    """Whether ``claims.json`` is of the records that a suite has now."""
    suites = _content().get("suites", {})
    return suites.get(suite, hashlib.sha256().hexdigest()) == digest(suite)


def models() -> list[dict[str, Any]]:
    """The published training runs of ACP: what they are, and what they came to."""
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
    """Runs the tests of the rows that are proved or checked by one; an error if one fails."""
    tests = list(dict.fromkeys(row.test for row in rows if row.test))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], capture_output=True, text=True)
    if done.returncode:
        raise SuiteError(f"a claim's test fails:\n{done.stdout[-2000:]}")
