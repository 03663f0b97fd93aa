"""The page as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ..verdict import Status, Word
from .gather import Line, Section

MEANINGS = {
    Word.HOLDS: "proved, or given by a formula, and a test shows it on this code; or measured on models like "
    "the paper's: as large, as long trained, with contexts as long",
    Word.HERE: "smaller or shorter trained models meet the criterion, or pass it on its good side, and then "
    "the line says so",
    Word.UNTOLD: "the records cannot show it, or there are none: the line says why",
    Word.FAILS: "the criterion is not met by the models of the line; or the paper is wrong as printed",
}
PLURALS = {Word.HOLDS: "hold", Word.HERE: "hold at our scale", Word.FAILS: "do not hold"}
HEADER = ("Claim", "The paper", "Here", "Measured on", "Verdict", "Shown by")


def render(sections: Sequence[Section]) -> str:
    """The whole page."""
    meanings = [f"| {word} | {meaning} |" for word, meaning in MEANINGS.items()]
    parts = [
        "# What holds of what the papers claim",
        "`make reproduction` writes this page from the published records; nothing on it is written by hand. "
        "Claims and criteria stand in `acp_repro/papers/`, what checks them in `analysis/`; the reports "
        "(`figures/SUITE/report.html`) show the figures behind them.",
        "\n".join(["| verdict | means |", "|---|---|", *meanings]),
        "Every claim is judged in each suite that says `published: true` and has records for it. Of the "
        "suites that can tell, the one with the most runs measured for the claim speaks, of equals the one "
        "whose models saw the most tokens; where another suite comes to another verdict, the line says so.",
        *(part for section in sections for part in _section(section)),
    ]
    return "\n\n".join(parts) + "\n"


def summary(section: Section) -> str:
    """ "Of 59 claims (...) 17 hold, 25 hold at our scale, ..."."""
    words = Counter(line.word for line in section.lines)
    beyond = sum(line.status is Status.BEYOND for line in section.lines)
    counts = [
        f"{words[word]} {word if words[word] == 1 else PLURALS.get(word, word)}"
        + (f" ({beyond} of them beyond the range that it prints)" if word is Word.HERE and beyond else "")
        for word in Word
        if words[word]
    ]
    listed = " and ".join(filter(None, (", ".join(counts[:-1]), counts[-1])))
    return f"Of {len(section.lines)} claims (one that two figures show counts twice) {listed}."


def _section(section: Section) -> list[str]:
    paper, lines = section.paper, section.lines
    parts = [f"## {paper.title}", f"[The paper]({paper.url}). {summary(section)}"]
    for title, some in (
        ("Its figures and tables", [line for line in lines if line.item]),
        ("What its text says besides", [line for line in lines if not line.item]),
    ):
        if some:
            parts += [f"### {title}", _table(some)]
    criteria = {line.claim.claim: line.claim.holds_if for line in lines if line.claim.holds_if}
    listed = "\n".join(f"- **{claim}**: {words}." for claim, words in criteria.items())
    return [*parts, "### When a claim holds", listed]


def _table(lines: Iterable[Line]) -> str:
    rows = [HEADER, ["---"] * len(HEADER), *map(_row, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(line: Line) -> list[str]:
    item = line.item
    where = f"<br>*{item.label}{', ours' if item.ours else ''}*" if item else ""
    beyond = "<br>beyond the range" if line.status is Status.BEYOND else ""
    cells = (
        line.claim.claim + where,
        line.paper,
        line.ours,
        line.scale,
        f"**{line.word}**{beyond}",
        _shown_by(line),
    )
    minus = re.compile(r"(?<=[\s\[])-(?=\d)")
    return [minus.sub("−", " ".join(cell.split())).replace("|", "\\|") or "–" for cell in cells]


def _shown_by(line: Line) -> str:
    """Links to the records, a word for each quantity; or to the test."""
    if line.claim.test:
        return f"[`{line.claim.test}`]({line.claim.test.partition('::')[0]})"
    links: dict[str, list[str]] = {}
    for quantity, run, path in line.records:
        links.setdefault(quantity, []).append(f"[{run}]({path.as_posix()})")
    return "; ".join(f"{quantity}: {', '.join(some)}" for quantity, some in links.items())
