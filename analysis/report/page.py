"""The report as Markdown: ``figures/SUITE/report.md``, beside its pictures."""

import re
from collections import Counter

from acp_repro.pipeline import planner
from acp_repro.pipeline.paper import FigureSpec, Suite

from ..ledger import Row
from ..tables import markdown_table
from ..verdict import Word
from .gather import Entry, Report

LINES = ("\n", "\n    - ")  # an answer with several sentences is a list
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
        "elsewhere": ("Other suites", _elsewhere(report)),
        "runs": ("Runs", ["## Runs", markdown_table(report.runs.columns, report.runs.to_numpy().tolist())]),
    }
    sections = {name: section for name, section in sections.items() if section[1]}
    left_out = ", ".join(f"{x.title} (`make {x.name} SUITE={suite.option}`)" for x in report.left_out)
    blocks = [
        f"# Report of suite {suite.name}: {paper.title}",
        f"{suite.description[:1].upper()}{suite.description[1:]}.",
        markdown_table(("property", "value"), _facts(report)),
        " · ".join(f"[{label}](#{name})" for name, (label, _) in sections.items()),
    ]
    for name, (_, text) in sections.items():
        blocks += [f'<div id="{name}"></div>', *text]
    blocks += [
        '<div id="end"></div>',
        *([f"Items that are drawn only by name: {left_out}."] if left_out else []),
        f"`make report SUITE={suite.option}` writes this page from the results of the suite. Numbers marked "
        "*paper* or *quoted* are the paper's. All other numbers are measured in this project.",
    ]
    return "\n\n".join(blocks) + "\n"


def _facts(report: Report) -> list[tuple[str, str]]:
    runs, url, page = len(report.runs), report.suite.paper.url, planner.heads_page(report.suite)
    measured = int((report.runs["metrics"] != "0").sum())
    share = "all measured" if measured == runs else f"{measured} with measurements"
    if not measured:
        share = "not trained, because the measurements need only the shapes of the models"
    models = f"{_plural(runs, 'run')}, {share}{'; ' * bool(report.models)}{report.models}"
    link = f"arXiv:{url.rpartition('/')[2]}" if "arxiv.org/abs/" in url else url
    return [
        ("Models", f"{models} ([all runs](#runs))"),
        *report.facts,
        *([("Explorer of the heads", f"[{planner.HEADS_TITLE}]({page.name})")] if page.is_file() else []),
        ("Paper", f"{report.suite.paper.title} ([{link}]({url}))"),
    ]


def _claims(report: Report) -> list[str]:
    judged = [(e, row) for e in report.entries for row in e.rows]
    title = "## Claims of the paper"
    if not judged:
        return [
            title,
            "No figure of this suite has a claim. All claims: [REPRODUCTION.md](../../REPRODUCTION.md).",
        ]
    counts = Counter(row.verdict for _, row in judged)
    count = ", ".join(f"{counts[word]} {word}" for word in Word if counts[word])
    rows = [
        (e.item.label, f"[{row.claim}](#{e.item.name})", row.ours, _badge(row), row.suite or "–")
        for e, row in judged
    ]
    return [
        title,
        f"{len(judged)} {'claim' if len(judged) == 1 else 'claims'}: {count}. {report.note}".strip(),
        markdown_table(("item", "claim", "this work", "verdict", "deciding suite"), rows),
    ]


def _section(entry: Entry, report: Report) -> list[str]:
    item, suite = entry.item, report.suite
    ours = " (not in the paper)" if item.ours else ""
    blocks, again = [f"## {item.label}: {item.title}{ours}"], f"make {item.name} SUITE={suite.option}"
    if entry.made:
        if entry.image:
            blocks.append(f"![{_description(entry)}]({entry.image.name})")
        blocks.append((entry.text or "").strip())
    else:
        blocks.append(f"> Not drawn yet. `{again}` measures the missing results and draws the item.")
    blocks += ["### Claims and results"] * bool(entry.rows)
    for row in entry.rows:
        blocks += _card(row, suite)
    records = "\n".join(f'<li><a href="../../{p.as_posix()}">{p.as_posix()}</a></li>' for p in entry.records)
    files = f"<summary>{_plural(len(entry.records), 'file')} of results</summary><ul>\n{records}\n</ul>"
    blocks += [f"Re-run: `{again}`", f"<details>{files}</details>" if records else ""]
    return list(filter(None, blocks))


def _card(row: Row, suite: Suite) -> list[str]:
    rows = [
        ("Paper", row.paper),
        ("Criterion", row.criterion),
        ("This work", row.numbers.replace(*LINES)),
        *(
            (f"Suite {name} alone", f"{verdict}\n{numbers}".replace(*LINES))
            for name, verdict, numbers in row.others
            if name == suite.name
        ),
        ("Re-run", f"`make claim ID={row.id} SUITE={suite.option}`"),
    ]
    return [f"#### {row.claim}: {_badge(row)}", "\n".join(f"- {name}: {words}" for name, words in rows)]


def _elsewhere(report: Report) -> list[str]:
    lines = [f"- {e.item.label}, {_in_sentence(e.item)}: {e.absent}." for e in report.entries if not e.shown]
    return ["## Items that need other suites", "\n".join(lines)] if lines else []


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
