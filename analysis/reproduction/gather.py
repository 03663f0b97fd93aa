"""The evidence for each claim, and what it shows: from the registries and the published records.

A claim of a figure or table is judged as in the report, in every published suite; :func:`strongest`
chooses one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from acp_repro.pipeline import plan
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.paper import Claim, Item, Paper, Suite
from acp_repro.pipeline.suite import load_suite, suite_names, suite_path

from .. import style
from ..report.gather import all_records, judge, of_item, paper_words, record_paths
from ..verdict import Status, Verdict, Word
from .again import Again, by_records, by_test, together

TELLING = (Status.MET, Status.BEYOND, Status.SHORT, Status.MISSED)


@dataclass(frozen=True)
class Line:
    """A claim and what became of it.

    Attributes:
        id: what ``make claim ID=`` takes: "acp.figure2.1", the paper, the item or "text", and which of its
            claims.
        item: whose claim it is; None for one of ``Paper.claims``.
        paper: the paper's words and where they stand.
        ours: our numbers, or why there are none.
        scale: the suite and the models that were measured; empty where there are none.
        records: (quantity, run, file) of what shows it.
        suite: the one whose records these are.
        runs: how many were measured for it.
        trained_tokens: the most that one of them saw.
        settled: how many shapes and contexts of them saw more than the start of training.
        largest: weights of the largest of these, where the paper's models have several sizes.
        again: what measures it again; None where nothing does.
    """

    id: str
    claim: Claim
    item: Item | None
    paper: str
    word: Word
    status: Status
    ours: str
    scale: str = ""
    records: tuple[tuple[str, str, Path], ...] = ()
    suite: str = ""
    runs: int = 0
    trained_tokens: int = 0
    settled: int = 0
    largest: int = 0
    again: Again | None = None


@dataclass(frozen=True)
class Section:
    """All lines of one paper."""

    paper: Paper
    lines: tuple[Line, ...]
    suites: tuple[Suite, ...] = ()  # all of ``experiments/`` that are of this paper


def gather(id: str | None = None) -> tuple[Section, ...]:
    """Every paper that has a published suite, with every claim that it makes.

    Args:
        id: the only claim that is looked at; sections without it are left out.

    Raises:
        SuiteError: no suite in ``experiments/`` is published.
    """
    every = list(_loaded())
    suites = [suite for suite in every if suite.file.published]
    if not suites:
        raise SuiteError("no suite in experiments/ says `published: true`")
    papers = {suite.paper.name: suite.paper for suite in suites}
    claims = {
        name: [one for one in numbered(paper) if id in (None, one[0])] for name, paper in papers.items()
    }
    suites = [suite for suite in suites if claims[suite.paper.name]]
    asked = {
        name: {quantity for _, claim, _ in some for quantity in claim.quantities}
        for name, some in claims.items()
    }
    bar = tqdm(suites, "records", unit="suite", leave=False, disable=None)
    records = {suite.name: all_records(suite, asked[suite.paper.name]) for suite in bar}
    sections = []
    for name in sorted(name for name in papers if claims[name]):
        paper, own = papers[name], [suite for suite in suites if suite.paper.name == name]
        lines = [
            of_text(id, claim, paper, own, records)
            if item is None
            else (of_pool if claim.pooled else of_records)(id, claim, item, item, own, records)
            for id, claim, item in tqdm(claims[name], name, unit="claim", leave=False, disable=None)
        ]
        of_paper = tuple(suite for suite in every if suite.paper.name == name)
        sections.append(Section(paper, tuple(lines), of_paper))
    return tuple(sections)


def _loaded() -> Iterator[Suite]:
    """All suites of ``experiments/``, but for a file that its author has neither finished nor published."""
    for name in suite_names():
        try:
            yield load_suite(name)
        except SuiteError as error:
            if "published: true" in suite_path(name).read_text(encoding="utf-8", errors="replace"):
                raise
            print(f"note: left out: {error}", file=sys.stderr)


def numbered(paper: Paper) -> list[tuple[str, Claim, Item | None]]:
    """(id, claim, item) of every claim of a paper, those of its text last, with no item."""
    groups = [(item, item.claims) for item in paper.items]
    return [
        (f"{paper.name}.{item.name if item else 'text'}.{number}", claim, item)
        for item, claims in (*groups, (None, paper.claims))
        for number, claim in enumerate(claims, 1)
    ]


def of_text(
    id: str,
    claim: Claim,
    paper: Paper,
    suites: Sequence[Suite],
    records: Mapping[str, Mapping[str, pd.DataFrame]],
) -> Line:
    """One of ``Paper.claims``: judged on records, or by a test, or not at all."""
    if claim.quantities:
        judged = of_pool if claim.pooled else of_records
        return judged(id, claim, None, paper.item(claim.item), suites, records)
    if claim.untested:
        verdict = Verdict(Status.UNDECIDED, claim.untested)
    elif claim.check:
        verdict = claim.check()
    else:
        verdict = Verdict.of(not claim.refuted, claim.refuted or "a test shows it, whatever the model")
    proved = Word.PROVED if verdict.status is Status.MET else Word.of(verdict.status)
    word = Word.MISPRINT if claim.refuted else proved
    words = paper_words(claim, paper)
    return Line(id, claim, None, words, word, verdict.status, verdict.ours, again=by_test(claim))


def of_records(
    id: str,
    claim: Claim,
    item: Item | None,
    judged_on: Item,
    suites: Sequence[Suite],
    records: Mapping[str, Mapping[str, pd.DataFrame]],
) -> Line:
    """A claim that is judged on the records of ``judged_on``.

    A claim of the text is not judged on a suite that leaves that item out: it has the records for other ends.
    """
    paper = suites[0].paper
    found = [
        of_suite(id, claim, item, judged_on, suite, records[suite.name])
        for suite in suites
        if set(paper.required(claim.quantities)) <= set(records[suite.name])
        and (item is not None or judged_on.name not in suite.file.leave_out)
    ]
    found = [line for line in found if line.status in (*TELLING, Status.UNDECIDED)]
    if not found:
        words, why = paper_words(claim, paper, judged_on), why_none(claim, judged_on, suites)
        again = (
            by_records(claim, judged_on, able, judged_on.runs(able))
            if (able := _able(judged_on, suites))
            else None
        )
        return Line(id, claim, item, words, Word.UNTOLD, Status.MISSING, why, again=again)
    first = strongest(found)
    others = [
        f"suite {line.suite}: {line.word} ({line.ours})"
        if line.status in TELLING
        else f"suite {line.suite} cannot tell: {line.ours}"
        for line in found
        if line.word is not first.word
    ]
    return replace(first, ours="; ".join((first.ours, *others)))


def of_pool(
    id: str,
    claim: Claim,
    item: Item | None,
    judged_on: Item,
    suites: Sequence[Suite],
    records: Mapping[str, Mapping[str, pd.DataFrame]],
) -> Line:
    """A claim that is judged once, on the records of all suites: see ``Claim.pooled``."""
    every = [one for one in suites[0].paper.items if any(c.check is claim.check for c in one.claims)]
    items = [item] if item else every
    places = [(one, suite, records[suite.name]) for suite in suites for one in items]
    found = [(of_suite(id, claim, item, *place), of_item(*place)) for place in places]
    found = [(line, tables) for line, tables in found if line.status in (*TELLING, Status.UNDECIDED)]
    if not found:
        return of_records(id, claim, item, judged_on, suites, records)
    lines = [line for line, _ in found]
    verdict = claim.check(*(pd.concat(tables[name] for _, tables in found) for name in claim.quantities))
    return replace(
        strongest(lines),
        word=Word.of(verdict.status),
        status=verdict.status,
        ours=verdict.ours,
        scale=". ".join(line.scale for line in lines),
        records=tuple(record for line in lines for record in line.records),
        runs=sum(line.runs for line in lines),
        settled=max(line.settled for line in lines),
        largest=max(line.largest for line in lines),
        trained_tokens=max(line.trained_tokens for line in lines),
        again=together([line.again for line in lines]),
    )


def strongest(found: Iterable[Line]) -> Line:
    """Of the suites that can tell, the one with the most shapes and contexts past the start of training; of
    equals the one with the most runs, then the largest model, then the longest trained."""
    found = list(found)
    telling = [line for line in found if line.status in TELLING] or found
    return max(telling, key=lambda line: (line.settled, line.runs, line.largest, line.trained_tokens))


def of_suite(
    id: str,
    claim: Claim,
    item: Item | None,
    judged_on: Item,
    suite: Suite,
    records: Mapping[str, pd.DataFrame],
) -> Line:
    """What one suite shows of a claim, with the scale and the files that show it."""
    models, runs = suite.paper.part("models"), judged_on.runs(suite)
    found = of_item(judged_on, suite, records)
    absent = "" if runs else plan.why_not(suite, judged_on)
    judgement = judge(claim, judged_on, suite, found, absent)
    tables = [found[name] for name in claim.quantities if name in found]
    named = {run for table in tables for run in table["run"].dropna()}
    measured = [run for run in runs if run.name in named]
    past_start = getattr(models, "past_start", len)
    largest = getattr(models, "largest", lambda runs: 0)
    at_scale = models is not None and models.at_paper_scale(judged_on, measured)
    files = [
        (name, run, path)
        for name in claim.quantities
        for run, path in record_paths(suite, suite.paper.quantity(name), runs)
        if path.is_file()
    ]
    shapes = models.shapes(measured) if models and measured else ""
    shapes += " (the paper's scale)" if at_scale else ""
    trained = [int(n) for table in tables for n in table["trained_tokens"].dropna().unique()]
    return Line(
        id,
        claim,
        item,
        judgement.paper,
        Word.of(judgement.status),
        judgement.status,
        judgement.ours,
        f"{suite.name}: " + "; ".join(filter(None, (shapes, *_origin(tables, suite.name)))),
        tuple(files),
        suite.name,
        len(measured),
        max(trained, default=0),
        past_start(measured),
        largest(measured),
        by_records(claim, judged_on, suite, measured),
    )


def _able(item: Item, suites: Sequence[Suite]) -> Suite | None:
    """The first suite that has runs for an item."""
    return next((suite for suite in suites if item.runs(suite)), None)


def why_none(claim: Claim, item: Item, suites: Sequence[Suite]) -> str:
    """Why no published records tell anything of a claim, and the command that would make some."""
    if (able := _able(item, suites)) is None:
        return f"no published suite has a run of {item.runs_needed}"
    lacks = " or ".join(f"`{name}`" for name in claim.quantities)
    return f"no published records of {lacks}; `make {item.name} SUITE={able.name}` makes them"


def _origin(tables: Sequence[pd.DataFrame], suite: str) -> list[str]:
    """Tokens of training and devices of some records of a suite."""
    if not tables:
        return []
    both = pd.concat([table[["trained_tokens", "device"]] for table in tables])
    counts = both["trained_tokens"].dropna()
    tokens = counts[counts > 0]
    weights = ["fresh weights"] * bool((counts == 0).any())
    if len(tokens):
        weights.insert(0, f"{style.count_span(tokens)} tokens{style.epochs(tokens.max(), suite)}")
    return [" and ".join(weights), ", ".join(sorted(both["device"].dropna().unique()))]
