"""The report as Markdown: ``figures/SUITE/report.md``, beside its pictures."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from acp_repro.pipeline.paper import Item

from ..verdict import Status
from .entries import Entry, Judgement, Report

# Verdict -> (badge, words of the count), in the order of the count.
STATUSES = {
    Status.MET: ("✓ met", "met"),
    Status.BEYOND: ("» beyond", "beyond the paper's range"),
    Status.SHORT: ("« short", "short of the paper's range"),
    Status.MISSED: ("✗ not met", "not met"),
    Status.UNDECIDED: ("? cannot be told", "cannot be told from these runs"),
    Status.MISSING: ("– not measured", "not measured"),
    Status.ABSENT: ("– not in this suite", "not in this suite"),
}


def render(report: Report) -> str:
    """The whole text."""
    suite, paper = report.suite, report.suite.paper
    sections = {
        "claims": ("Claims", _claims(report)),
        **{e.item.name: (e.item.label, _section(e, report)) for e in report.entries if e.shown},
        "elsewhere": ("Not in this suite", _elsewhere(report)),
        "runs": ("Runs", ["## Runs", _table(report.runs.columns, report.runs.to_numpy().tolist())]),
    }
    sections = {name: section for name, section in sections.items() if section[1]}
    left_out = ", ".join(f"{x.title} (`make {x.name} SUITE={suite.option}`)" for x in report.left_out)
    blocks = [
        f"# {paper.title}, re-run: suite {suite.name}",
        f"{suite.description[:1].upper()}{suite.description[1:]}.",
        _table(("", ""), _facts(report)),
        " · ".join(f"[{label}](#{name})" for name, (label, _) in sections.items()),
    ]
    for name, (_, text) in sections.items():
        blocks += [f'<div id="{name}"></div>', *text]
    blocks += [
        '<div id="end"></div>',
        *([f"Not drawn here: {left_out}."] if left_out else []),
        f"Made by `make report SUITE={suite.option}` from records alone; every number on this page is "
        "measured by us or, where marked, printed in the paper.",
    ]
    return "\n\n".join(blocks) + "\n"


def _facts(report: Report) -> list[tuple[str, str]]:
    runs, url = len(report.runs), report.suite.paper.url
    measured = int((report.runs["quantities"] != "0").sum())
    share = "all measured" if measured == runs else f"{measured} of them measured"
    if not measured:
        share = "none of them trained: what is measured needs their shapes alone"
    models = f"{_plural(runs, 'run')}, {share}{'; ' * bool(report.models)}{report.models}"
    link = f"arXiv:{url.rpartition('/')[2]}" if "arxiv.org/abs/" in url else url
    return [
        ("Models", f"{models} ([all runs](#runs))"),
        *report.facts,
        *(("Look around", page.link) for page in report.pages),
        ("The paper", f"{report.suite.paper.title} ([{link}]({url}))"),
    ]


def _claims(report: Report) -> list[str]:
    judged = [(e, found) for e in report.entries for found in e.judgements]
    title = "## What the paper claims, checked"
    if not judged:
        return [title, "No claim of the paper is written down as a criterion."]
    counts = Counter(found.status for _, found in judged)
    count = ", ".join(
        f"{counts[status]} {words}" for status, (_, words) in STATUSES.items() if counts[status]
    )
    rows = [
        (_badge(found), f"[{found.claim.claim}](#{e.item.name}) *{e.item.label}*", found.ours)
        for e, found in judged
        if found.status != Status.ABSENT
    ]
    return [
        title,
        f"{len(judged)} {'criterion' if len(judged) == 1 else 'criteria'}: {count}. Each is stated in words "
        "beside its figure, and only one that holds for these runs as stated gets a check mark; better than "
        f"a range that the paper prints is “beyond”, less “short”. {report.caveat}".strip(),
        _table(("Verdict", "Claim", "Here"), rows),
    ]


def _section(entry: Entry, report: Report) -> list[str]:
    item, suite = entry.item, report.suite
    ours = " *ours, not in the paper*" if item.ours else ""
    blocks, again = [f"## {item.label}: {item.title}{ours}"], f"make {item.name} SUITE={suite.option}"
    if entry.made:
        if entry.image:
            blocks.append(f"![{_description(entry)}]({entry.image.name})")
        blocks.append((entry.text or "").strip())
    else:
        blocks.append(f"> Not drawn yet. `{again}` measures what is missing and draws it.")
    judged = [found for found in entry.judgements if found.status != Status.ABSENT]
    blocks += ["### The paper and these runs"] * bool(judged)
    for number, found in enumerate(judged, 1):
        id = f"{suite.paper.name}.{item.name}.{number}"
        blocks += _card(found, f"`make claim ID={id} SUITE={suite.option}`")
    if entry.made and entry.scale:
        blocks.append(entry.scale)
    lines = [f"<code>{html.escape(step)}</code>" for step in entry.steps]
    lines += [f"not measured: {html.escape(line)}" for line in entry.unmeasured]
    lines += [f'<a href="../../{p.as_posix()}">{p.as_posix()}</a>' for p in entry.records]
    summary = "The steps one by one"
    if entry.records:
        summary += f", {_plural(len(entry.records), 'record')}"
    if entry.unmeasured:
        summary += f", {_plural(len(entry.unmeasured), 'run')} still to be measured"
    steps = "\n".join(f"<li>{line}</li>" for line in lines)
    return [
        *filter(None, blocks),
        f"Make it again: `{again}`",
        f"<details><summary>{summary}</summary><ul>\n{steps}\n</ul></details>",
    ]


def _card(found: Judgement, again: str) -> list[str]:
    rows = [("Paper", found.paper), ("Criterion", found.claim.holds_if), ("Here", found.ours)]
    rows.append(("Again", again))
    return [f"#### {_badge(found)} {found.claim.claim}", _table(("", ""), rows)]


def _elsewhere(report: Report) -> list[str]:
    lines = [f"- {e.item.label}, {_in_sentence(e.item)}: {e.absent}." for e in report.entries if not e.shown]
    return ["## Not in this suite", "\n".join(lines)] if lines else []


def _in_sentence(item: Item) -> str:
    """A title inside a sentence: its first letter is small, unless it begins with an acronym."""
    first, rest = item.title[:1], item.title[1:]
    return item.title if rest[:1].isupper() else first.lower() + rest


def _description(entry: Entry) -> str:
    """What a picture shows: the first sentence after "**Figure N.**"; the caption says the rest."""
    words = re.sub(r"\*\*[^*]*\*\*", "", entry.text or entry.item.title, count=1)
    first = re.split(r"\.\s", words.strip(), maxsplit=1)[0]
    return f"{entry.item.label}: {' '.join(re.sub(r'[*$`{}]', '', first).split()).rstrip('.')}."


def _badge(found: Judgement) -> str:
    return f"**{STATUSES[found.status][0]}**"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    lines = ([" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
