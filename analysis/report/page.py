"""The report as Markdown: ``figures/SUITE/report.md``, beside its pictures."""

import re
from collections import Counter

from acp_repro.pipeline import planner
from acp_repro.pipeline.paper import FigureSpec, Suite

from ..ledger import Row
from ..tables import markdown_table
from ..verdict import Word
from .gather import Entry, Report

BADGES = {
    Word.REPRODUCED: "✓",
    Word.SMALL_SCALE: "✓",
    Word.MAGNITUDE: "≈",
    Word.INCONCLUSIVE: "?",
    Word.CONTRADICTED: "✗",
    Word.PROVED: "✓",
    Word.TESTED: "✓",
    Word.ERRATUM: "✗",
}


def render(report: Report) -> str:
    """The whole text."""
    suite, paper = report.suite, report.suite.paper
    sections = {
        "claims": ("Claims", _claims(report)),
        **{e.item.name: (e.item.label, _section(e, report)) for e in report.entries if e.shown},
        "elsewhere": ("Not in this suite", _elsewhere(report)),
        "runs": ("Runs", ["## Runs", markdown_table(report.runs.columns, report.runs.to_numpy().tolist())]),
    }
    sections = {name: section for name, section in sections.items() if section[1]}
    left_out = ", ".join(f"{x.title} (`make {x.name} SUITE={suite.option}`)" for x in report.left_out)
    blocks = [
        f"# {paper.title}: suite {suite.name}",
        f"{suite.description[:1].upper()}{suite.description[1:]}.",
        markdown_table(("", ""), _facts(report)),
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
    runs, url, page = len(report.runs), report.suite.paper.url, planner.heads_page(report.suite)
    measured = int((report.runs["metrics"] != "0").sum())
    share = "all measured" if measured == runs else f"{measured} of them measured"
    if not measured:
        share = "none of them trained: what is measured needs their shapes alone"
    models = f"{_plural(runs, 'run')}, {share}{'; ' * bool(report.models)}{report.models}"
    link = f"arXiv:{url.rpartition('/')[2]}" if "arxiv.org/abs/" in url else url
    return [
        ("Models", f"{models} ([all runs](#runs))"),
        *report.facts,
        *([("Look around", f"[{planner.HEADS_TITLE}]({page.name})")] if page.is_file() else []),
        ("The paper", f"{report.suite.paper.title} ([{link}]({url}))"),
    ]


def _claims(report: Report) -> list[str]:
    judged = [(e, row) for e in report.entries for row in e.rows]
    title = "## Claims of the paper"
    if not judged:
        return [title, "Its figures have no criterion; [REPRODUCTION.md](../../REPRODUCTION.md) has all."]
    counts = Counter(row.verdict for _, row in judged)
    count = ", ".join(f"{counts[word]} {word}" for word in Word if counts[word])
    rows = [
        (_badge(row), f"[{row.claim}](#{e.item.name}) *{e.item.label}*", row.ours, row.suite or "–")
        for e, row in judged
    ]
    return [
        title,
        f"{len(judged)} {'claim' if len(judged) == 1 else 'claims'}: {count}. {report.note}".strip(),
        markdown_table(("Verdict", "Claim", "Here", "Judged on"), rows),
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
    blocks += ["### The paper and these runs"] * bool(entry.rows)
    for row in entry.rows:
        blocks += _card(row, suite)
    records = "\n".join(f'<li><a href="../../{p.as_posix()}">{p.as_posix()}</a></li>' for p in entry.records)
    summary = _plural(len(entry.records), "file") + " of results"
    folded = f"<details><summary>{summary}</summary><ul>\n{records}\n</ul></details>"
    return [*filter(None, blocks), f"Command: `{again}`", *([folded] if records else [])]


def _card(row: Row, suite: Suite) -> list[str]:
    own = [f"{verdict}. {numbers}" for name, verdict, numbers in row.others if name == suite.name]
    rows = [
        ("Paper", row.paper),
        ("Criterion", row.criterion),
        ("Here", row.numbers.replace("\n", ". ")),
        *(("This suite alone", words.replace("\n", ". ")) for words in own),
        ("Again", f"`make claim ID={row.id} SUITE={suite.option}`"),
    ]
    return [f"#### {_badge(row)} {row.claim}", markdown_table(("", ""), rows)]


def _elsewhere(report: Report) -> list[str]:
    lines = [f"- {e.item.label}, {_in_sentence(e.item)}: {e.absent}." for e in report.entries if not e.shown]
    return ["## Not in this suite", "\n".join(lines)] if lines else []


def _in_sentence(item: FigureSpec) -> str:
    """The title within a sentence: lower case, unless the first word is an acronym or a name such as FoX."""
    first, _, rest = item.title.partition(" ")
    return item.title if first[1:] != first[1:].lower() else f"{first.lower()} {rest}".rstrip()


def _description(entry: Entry) -> str:
    """The alternative text of a picture: the first sentence of the caption after "**Figure N.**"."""
    words = re.sub(r"\*\*[^*]*\*\*", "", entry.text or entry.item.title, count=1)
    first = re.split(r"\.\s", words.strip(), maxsplit=1)[0]
    return f"{entry.item.label}: {' '.join(re.sub(r'[*$`{}]', '', first).split()).rstrip('.')}."


def _badge(row: Row) -> str:
    return f"**{BADGES[row.verdict]} {row.verdict}**"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"
