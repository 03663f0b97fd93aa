"""The report as HTML: one self-contained page, from ``page.html.j2`` and ``report.css`` beside this file."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from acp_repro.chain.paper import Item

from ..verdict import Status
from .entries import Entry, Judgement, Report
from .text import inline, paragraphs_and_tables, plain

# Verdict -> (badge, CSS class, words of the count), in the order of the count.
STATUSES = {
    Status.MET: ("✓ met", " met", "met"),
    Status.BEYOND: ("» beyond", " beyond", "beyond the paper's range"),
    Status.SHORT: ("« short", " beyond", "short of the paper's range"),
    Status.MISSED: ("✗ not met", " missed", "not met"),
    Status.UNDECIDED: ("? cannot be told", "", "cannot be told from these runs"),
    Status.MISSING: ("– not measured", "", "not measured"),
    Status.ABSENT: ("– not in this suite", "", "not in this suite"),
}
_INCH = 96 * 1.05  # CSS pixels that a printed inch takes on the page
_FOLDER = Path(__file__).parent


def render(report: Report) -> str:
    """The whole page; image data and style are inside it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"inline": inline, "in_sentence": in_sentence}
    environment.globals |= {"statuses": STATUSES, "absent": Status.ABSENT}
    paper, suite = report.suite.paper, report.suite
    return environment.get_template("page.html.j2").render(
        report=report,
        suite=suite,
        paper=paper,
        paper_link=link_words(paper.url),
        measured=int((report.runs["quantities"] != "0").sum()),
        css=(_FOLDER / "report.css").read_text(encoding="utf-8"),
        judged=(judged := claims_of(report.entries)),
        counted=counted([judgement for _, judgement in judged]),
        sections=[(entry, figure(entry)) for entry in report.entries if entry.shown],
        elsewhere=[entry for entry in report.entries if not entry.shown],
    )


def link_words(url: str) -> str:
    """ "arXiv:2504.06949" for a page of arXiv, else the address itself."""
    return f"arXiv:{url.rpartition('/')[2]}" if "arxiv.org/abs/" in url else url


def in_sentence(item: Item) -> str:
    """A title inside a sentence: its first letter is small, unless it begins with an acronym."""
    first, rest = item.title[:1], item.title[1:]
    return item.title if rest[:1].isupper() else first.lower() + rest


def claims_of(entries: Sequence[Entry]) -> list[tuple[Entry, Judgement]]:
    """What was found of each claim of the paper; controls are shown beside their figures alone."""
    return [(entry, found) for entry in entries for found in entry.judgements if not found.claim.control]


def counted(judgements: Sequence[Judgement]) -> str:
    """ "20 met, 2 not met"."""
    counts = Counter(judgement.status for judgement in judgements)
    return ", ".join(
        f"{counts[status]} {words}" for status, (_, _, words) in STATUSES.items() if counts[status]
    )


def figure(entry: Entry) -> dict[str, Any]:
    """What the template shows of an image or table: sizes in CSS pixels, description, caption, tables."""
    caption, tables = paragraphs_and_tables(entry.text or "")
    if entry.image is None:
        return {"caption": caption, "tables": tables, "image": None, "scrolls": True}
    content = entry.image.read_bytes()
    width, height = Image.open(io.BytesIO(content)).size
    shown = round(width / 300 * _INCH)  # drawing.save writes 300 dots an inch
    # The first sentence after "Figure N." says what is drawn; the caption below says the rest.
    # Items of our own are named there, not numbered.
    words = plain(entry.text) if entry.text else entry.item.title
    first, _, rest = words.partition(". ")
    words = rest.split(". ", 1)[0] if rest else first
    if not first.startswith(("Figure ", "Table ")):
        words = f"{first.rstrip('.')}. {words}" if rest else words
    image = {
        "width": shown,
        "height": round(shown * height / width),
        "alt": f"{entry.item.label}: {words.rstrip('.')}.",
        "data": base64.b64encode(content).decode(),
    }
    return {"caption": caption, "tables": tables, "image": image, "scrolls": shown > 500}
