"""The page as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ..verdict import Word
from .gather import Line, Section

MEANINGS = {
    Word.PROVED: "a proof or a formula gives it, whatever the model, and a test shows it on this code",
    Word.MEASURED: "the models of the line meet the criterion: the paper's range, or what it says in words",
    Word.ANOTHER_SIZE: "they show the effect that the paper reports, with a larger or a smaller number than "
    "its range",
    Word.UNTOLD: "the records cannot show it, or there are none: the line says why",
    Word.CONTRADICTED: "the models of the line do not meet the criterion",
    Word.MISPRINT: "the paper is wrong as printed; the line says what is right",
}
# Of one claim and of several, as in "2 are misprints".
IN_SENTENCE = {
    Word.PROVED: ("is proved or computed", "are proved or computed"),
    Word.MEASURED: ("is measured in the paper's range", "are measured in the paper's range"),
    Word.ANOTHER_SIZE: (
        "has the same direction and another size",
        "have the same direction and another size",
    ),
    Word.UNTOLD: ("cannot be told", "cannot be told"),
    Word.CONTRADICTED: ("is contradicted", "are contradicted"),
    Word.MISPRINT: ("is a misprint", "are misprints"),
}
HEADER = ("Claim", "The paper", "Here", "Measured on", "Verdict", "Shown by", "Measure it again")


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
        "whose models saw the most tokens; where another suite comes to another verdict, the line says so. "
        "Whatever is measured holds at the scale that stands beside it, and no further.",
        "`make claim ID=acp.figure2.1` measures a line again: it trains what lacks weights, measures, and "
        "prints the old and the new number and verdict; with `SUITE=cpu` on the small models of a laptop. "
        "The seconds are those of the trainings that the records are of, and of the measuring where the "
        "records say it.",
        *(part for section in sections for part in _section(section)),
    ]
    return "\n\n".join(parts) + "\n"


def summary(section: Section) -> str:
    """ "Of 59 claims (...) 17 are proved or computed, 25 are measured in the paper's range, ..."."""
    words = Counter(line.word for line in section.lines)
    counts = [f"{words[word]} {IN_SENTENCE[word][words[word] > 1]}" for word in Word if words[word]]
    listed = " and ".join(filter(None, (", ".join(counts[:-1]), counts[-1])))
    return f"Of {len(section.lines)} claims (one that two figures show counts twice) {listed}."


def quick(section: Section) -> str:
    """ "43 can be measured again ..., 20 of them ..."."""
    found = [line.again for line in section.lines if line.again and line.again.quick]
    tests = sum(not again.suite for again in found)
    words = f"{len(found)} can be measured again with less than half an hour of training on one GPU"
    return (
        f"{words}; {tests} of these are tests, each under a minute on two CPU cores."
        if tests
        else f"{words}."
    )


def _section(section: Section) -> list[str]:
    paper, lines = section.paper, section.lines
    parts = [f"## {paper.title}", f"[The paper]({paper.url}). {summary(section)} {quick(section)}"]
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
    cells = (line.claim.claim + where, line.paper, line.ours, line.scale, f"**{line.word}**", _shown_by(line))
    cells += (f"`make claim ID={line.id}`: {line.again.cost}" if line.again else "",)
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
