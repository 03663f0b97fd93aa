"""The evidence for each claim, and what it shows: from the registries and the published records.

A claim of a figure or table is judged as in the report, in every published suite; :func:`strongest`
chooses one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pandas as pd

from acp_repro.chain import rules
from acp_repro.chain.errors import SuiteError
from acp_repro.chain.paper import Claim, Item, Paper, Suite
from acp_repro.chain.suite import load_suite, suite_names

from .. import style
from ..report.entries import Judgement
from ..report.gather import all_records, judge, of_item, paper_words, record_paths
from ..verdict import Status, Verdict, Word

TELLING = (Status.MET, Status.BEYOND, Status.SHORT, Status.MISSED)


@dataclass(frozen=True)
class Line:
    """A claim and what became of it.

    Attributes:
        item: whose claim it is; None for one of ``Paper.claims``.
        paper: the paper's words and where they stand.
        ours: our numbers, or why there are none.
        scale: the suite and the models that were measured; empty where there are none.
        records: (quantity, run, file) of what shows it.
    """

    claim: Claim
    item: Item | None
    paper: str
    word: Word
    status: Status
    ours: str
    scale: str = ""
    records: tuple[tuple[str, str, Path], ...] = ()


@dataclass(frozen=True)
class Section:
    """All lines of one paper."""

    paper: Paper
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Evidence:
    """What one suite shows of a claim.

    Attributes:
        runs: how many were measured for it.
        trained_tokens: the most that one of them saw.
    """

    suite: str
    judgement: Judgement
    word: Word
    runs: int
    trained_tokens: int
    scale: str
    records: tuple[tuple[str, str, Path], ...]


def gather() -> tuple[Section, ...]:
    """Every paper that has a published suite, with every claim that it makes.

    Raises:
        SuiteError: no suite in ``experiments/`` is published.
    """
    suites = [suite for suite in map(load_suite, suite_names()) if suite.file.published]
    if not suites:
        raise SuiteError("no suite in experiments/ says `published: true`")
    papers = {suite.paper.name: suite.paper for suite in suites}
    asked = {
        name: {quantity for claim in _all_claims(paper) for quantity in claim.quantities}
        for name, paper in papers.items()
    }
    records = {suite.name: all_records(suite, asked[suite.paper.name]) for suite in suites}
    sections = []
    for name in sorted(papers):
        paper, own = papers[name], [suite for suite in suites if suite.paper.name == name]
        items = [(claim, item) for item in paper.items for claim in item.claims if not claim.control]
        lines = [of_records(claim, item, item, own, records) for claim, item in items]
        lines += [of_text(claim, paper, own, records) for claim in paper.claims]
        sections.append(Section(paper, tuple(lines)))
    return tuple(sections)


def of_text(
    claim: Claim, paper: Paper, suites: Sequence[Suite], records: Mapping[str, Mapping[str, pd.DataFrame]]
) -> Line:
    """One of ``Paper.claims``: judged on records, or by a test, or not at all."""
    if claim.quantities:
        return of_records(claim, None, paper.item(claim.item), suites, records)
    if claim.untested:
        verdict = Verdict(Status.UNDECIDED, claim.untested)
    elif claim.check:
        verdict = claim.check()
    else:
        verdict = Verdict.of(not claim.refuted, claim.refuted or "a test shows it, whatever the model")
    proved = Word.PROVED if verdict.status is Status.MET else Word.of(verdict.status)
    word = Word.MISPRINT if claim.refuted else proved
    return Line(claim, None, paper_words(claim, paper), word, verdict.status, verdict.ours)


def of_records(
    claim: Claim,
    item: Item | None,
    judged_on: Item,
    suites: Sequence[Suite],
    records: Mapping[str, Mapping[str, pd.DataFrame]],
) -> Line:
    """A claim that is judged on the records of ``judged_on``."""
    paper = suites[0].paper
    words = paper_words(claim, paper, judged_on)
    models = paper.part("models")
    found = [
        evidence_of(claim, judged_on, suite, records[suite.name], models)
        for suite in suites
        if set(claim.quantities) <= set(records[suite.name])
    ]
    found = [one for one in found if one.judgement.status in (*TELLING, Status.UNDECIDED)]
    if not found:
        return Line(claim, item, words, Word.UNTOLD, Status.MISSING, why_none(claim, judged_on, suites))
    first = strongest(found)
    others = [
        f"suite {one.suite}: {one.word}"
        for one in found
        if one.judgement.status in TELLING and one.word is not first.word
    ]
    ours = "; ".join((first.judgement.ours, *others))
    return Line(claim, item, words, first.word, first.judgement.status, ours, first.scale, first.records)


def strongest(found: Iterable[Evidence]) -> Evidence:
    """Of the suites that can tell, the one with the most runs measured, of equals the longest trained."""
    found = list(found)
    telling = [one for one in found if one.judgement.status in TELLING] or found
    return max(telling, key=lambda one: (one.runs, one.trained_tokens))


def evidence_of(
    claim: Claim, item: Item, suite: Suite, records: Mapping[str, pd.DataFrame], models: ModuleType | None
) -> Evidence:
    """What a suite shows of a claim, with the scale and the files that show it."""
    runs = item.runs(suite)
    found = of_item(item, suite, records)
    judgement = judge(claim, item, suite, found, "" if runs else rules.why_not(suite, item))
    tables = [found[name] for name in claim.quantities if name in found]
    named = {run for table in tables for run in table["run"].dropna()}
    measured = [run for run in runs if run.name in named]
    at_scale = models is not None and models.at_paper_scale(item, measured)
    files = [
        (name, run, path)
        for name in claim.quantities
        for run, path in record_paths(suite, suite.paper.quantity(name), runs)
        if path.is_file()
    ]
    shapes = models.shapes(measured) if models and measured else ""
    shapes += " (the paper's scale)" if at_scale else ""
    trained = [int(n) for table in tables for n in table["trained_tokens"].dropna().unique()]
    return Evidence(
        suite.name,
        judgement,
        Word.of(judgement.status),
        len(measured),
        max(trained, default=0),
        f"{suite.name}: " + "; ".join(filter(None, (shapes, *_origin(tables)))),
        tuple(files),
    )


def why_none(claim: Claim, item: Item, suites: Sequence[Suite]) -> str:
    """Why no published records tell anything of a claim, and the command that would make some."""
    able = next((suite for suite in suites if item.runs(suite)), None)
    if able is None:
        return f"no published suite has a run of {item.needs}"
    lacks = " or ".join(f"`{name}`" for name in claim.quantities)
    return f"no published records of {lacks}; `make {item.name} SUITE={able.name}` makes them"


def _all_claims(paper: Paper) -> list[Claim]:
    return [*(claim for item in paper.items for claim in item.claims), *paper.claims]


def _origin(tables: Sequence[pd.DataFrame]) -> list[str]:
    """Tokens of training and devices of some records."""
    if not tables:
        return []
    both = pd.concat([table[["trained_tokens", "device"]] for table in tables])
    counts = both["trained_tokens"].dropna()
    tokens = counts[counts > 0]
    span = " to ".join(dict.fromkeys(style.count_label(n) for n in (tokens.min(), tokens.max())))
    weights = [f"{span} tokens"] * bool(len(tokens)) + ["fresh weights"] * bool((counts == 0).any())
    return [" and ".join(weights), ", ".join(sorted(both["device"].dropna().unique()))]
