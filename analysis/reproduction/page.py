"""The page as Markdown."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..verdict import Word
from .gather import Line, Section
from .missing import ANSWERED, gaps

MEANINGS = {
    Word.PROVED: "a proof or a formula gives it, whatever the model, and a test shows it on this code",
    Word.MEASURED: "the models of the line meet the criterion: the paper's range, or its words where it has "
    "none",
    Word.ANOTHER_SIZE: "the models of the line show the effect that the paper reports, with a larger or a "
    "smaller number than its range",
    Word.UNTOLD: "the records cannot show it, or there are none: the line says why",
    Word.CONTRADICTED: "the models of the line do not meet the criterion",
    Word.MISPRINT: "the paper is wrong as printed; the line says what is right",
}
# What a reader in a hurry wants to know, in this order.
HEADLINES = ("acp.figureA1.1", "acp.text.19", "acp.figure2.1", "acp.figure2.3", "acp.figureA6.1")
HEADER = ("Claim", "The paper", "Here", "Measured on", "Verdict", "Shown by", "Measure it again")


def render(sections: Sequence[Section]) -> str:
    """The whole page."""
    lines = {line.id: line for section in sections for line in section.lines}
    headlines = [_cells(lines[id]) for id in HEADLINES if id in lines]
    parts = [
        "# Reproduction: what holds of what the papers claim",
        "Each line of this page is one claim of a paper, with our number and a verdict. The first table has "
        "the most important claims. The second counts all of them.",
        _markdown(("Claim", "Here", "Verdict"), ([cell[0], cell[2], cell[4]] for cell in headlines)),
        _markdown(("Paper", "claims", *Word), map(_counts, sections)),
        _markdown(("verdict", "means"), MEANINGS.items()),
        "## How to read it",
        "- `make reproduction` writes this page from the published records. Nothing on it is written by "
        "hand. Each claim and its criterion stand in its figure's Python file, in `analysis/acp/`, "
        "`analysis/lap/` or `analysis/retention/`. The reports "
        "(`figures/SUITE/report.md`) show the figures.\n"
        "- A verdict holds at the scale that stands beside it, and no further.\n"
        "- A *suite*, such as `h100`, is a set of trainings with its records. *Start of training* marks a "
        "model that saw few tokens for its size. Where a line has other models too, its range and growth are "
        "judged on those others alone. *Exact* is attention without pruning.\n"
        "- Square brackets hold a 95 % interval. The loss, the downstream results and the many facts of "
        "ACP have a 90 % interval, as one-sided tests at 5 % need.\n"
        "- Where several suites have records of a claim, one decides. Of those that can tell it is the one "
        "with the most shapes and contexts past the start of training. With equal numbers it is the one with "
        "the most runs, then the one with the largest model, then the one whose models saw the most tokens. "
        "Where another suite comes to another verdict, or cannot tell, the line gives its numbers. A claim "
        "that two figures show counts twice. "
        "*All pairs together* are those of all suites but `h200-needle`, whose text holds needles, judged "
        "once. So are the tasks of Adaptive Retention's "
        "Tables 1 and 2, with the encoder in brackets.\n"
        "- `make claim ID=acp.figure2.1` measures a line again. It trains runs that lack weights, measures, "
        "and prints the old and the new number and verdict. With `SUITE=cpu` it takes the small models of a "
        "laptop. The last column gives the training time behind the records. It includes the measuring where "
        "the records say it.",
        *(part for section in sections for part in _section(section)),
        "## What is missing",
        "Nobody has trained or measured these. The right column says what would.",
        _markdown(("Paper", "Missing", "Made by"), (row for section in sections for row in _gaps(section))),
        "## What is answered",
        "The code of these studies is at the tag `v1-full`: `git worktree add ../v1-full v1-full`. Their "
        "records and pictures stay.",
        "\n".join(
            f"- {study}: {answer}."
            for section in sections
            for study, answer in ANSWERED.get(section.paper.name, ())
        ),
    ]
    return "\n\n".join(parts) + "\n"


def summary(section: Section) -> str:
    """ "62 claims: 18 proved or computed; 25 measured in the paper's range; ..."."""
    words = Counter(line.word for line in section.lines)
    plural = {Word.MISPRINT: "misprints"}
    counts = [
        f"{words[word]} {plural.get(word, word) if words[word] > 1 else word}" for word in Word if words[word]
    ]
    return f"{len(section.lines)} claims: {'; '.join(counts)}."


def _counts(section: Section) -> list[str]:
    words = Counter(line.word for line in section.lines)
    return [section.paper.title, str(len(section.lines)), *(str(words[word] or "–") for word in Word)]


def quick(section: Section) -> str:
    """ "43 can be measured again .... 20 of these ..."."""
    found = [line.again for line in section.lines if line.again and line.again.quick]
    tests = sum(not again.suite for again in found)
    words = f"{len(found)} can be measured again with less than half an hour of training on one GPU"
    return (
        f"{words}. {tests} of these are tests, which take under a minute each on two CPU cores."
        if tests
        else f"{words}."
    )


def _section(section: Section) -> list[str]:
    paper, lines = section.paper, section.lines
    parts = [f"## {paper.title}", f"[The paper]({paper.url}) makes {summary(section)} {quick(section)}"]
    for title, some in (
        ("Its figures and tables", [line for line in lines if line.item]),
        ("What its text says besides", [line for line in lines if not line.item]),
    ):
        if some:
            parts += [f"### {title}", _table(some)]
    criteria = {line.claim.claim: line.claim.holds_if for line in lines if line.claim.holds_if}
    listed = "\n".join(f"- **{claim}**: {words}." for claim, words in criteria.items())
    return [*parts, "### When a claim holds", listed]


def _gaps(section: Section) -> Iterator[list[str]]:
    for gap in gaps(section):
        yield [section.paper.name, *(words.replace("|", "\\|") for words in gap)]


def _table(lines: Iterable[Line]) -> str:
    return _markdown(HEADER, map(_cells, lines))


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def _cells(line: Line) -> list[str]:
    item = line.item
    where = f"<br>*{item.label}{', ours' if item.ours else ''}*" if item else ""
    cells = (line.claim.claim + where, line.paper, line.ours, line.scale, f"**{line.word}**", _shown_by(line))
    cells += (f"`make claim ID={line.id}`: {line.again.cost}" if line.again else "",)
    minus = re.compile(r"(?<=[\s\[])-(?=\d)")
    return [minus.sub("−", " ".join(cell.split())).replace("|", "\\|") or "–" for cell in cells]


def _shown_by(line: Line) -> str:
    """A link to the test, or for each quantity to the folder of its run, or to that of all its runs."""
    if line.claim.test:
        return f"[`{line.claim.test}`]({line.claim.test.partition('::')[0]})"
    files: dict[str, list[tuple[str, Path]]] = {}
    for quantity, run, path in line.records:
        files.setdefault(quantity, []).append((run, path))
    links = []
    for quantity, found in files.items():
        name = f"{len(found)} runs" if len(found) > 1 else found[0][0]
        target = Path(os.path.commonpath([path.parent for _, path in found]))
        links.append(f"{quantity} of [{name}]({target.as_posix()})")
    return "; ".join(links)
