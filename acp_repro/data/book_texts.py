"""The plain text of a book, from its file in one of the four repositories that `books` reads.

Each rule is the one by which the shards of the suites were made, to the byte: the records and the committed
model were made from them. So a rule is not to be improved here, however plain a flaw may be.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Callable

from acp_repro.data.files import DataError

_WRAPPED = 55  # columns: a paragraph whose lines are mostly this long was broken to fit a page


def read(data: bytes, source: str) -> str:
    """The text of a file's bytes, with one line end at its end; ``source`` is a key of `RULES`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    return _tidy(RULES[source](text))


def _lines(text: str) -> str:
    """Line ends of Unix, no blanks at the ends of lines, no byte-order marks in the text."""
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip(" \t") for line in text.split("\n"))


def _tidy(text: str) -> str:
    """At most two blank lines together, none at the ends."""
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def _unwrap(text: str) -> str:
    """A paragraph that was broken into lines of a page becomes one line; verse and tables stay.

    A second blank line counts as the next paragraph's first line, of no length: it keeps two lines apart.
    """
    paragraphs = re.sub(r"\n{4,}", "\n\n\n", text).split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        lines = paragraph.split("\n")
        if (
            len(lines) > 1
            and statistics.median(map(len, lines[:-1])) >= _WRAPPED
            and not any(line.startswith(("    ", "\t")) for line in lines)
        ):
            paragraphs[number] = " ".join(line.strip() for line in lines)
    return "\n\n".join(paragraphs)


def _markdown(text: str) -> str:
    """Markdown below a header of title, author and year that ends with a rule."""
    return re.sub(r"^.*?\n-{5,}\n", "", _lines(text), count=1, flags=re.DOTALL)


def _plain(text: str) -> str:
    return _unwrap(_lines(text).strip() + "\n")


_START = re.compile(
    r"^.*\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG.*\n|^\*END.?THE SMALL PRINT!.*\*END\*\n",
    re.MULTILINE,
)
_END = re.compile(
    r"^.*\*\*\* END OF (?:THE|THIS) PROJECT.*|^.*End of (?:the )?Project Gutenberg.*", re.MULTILINE
)
_LATE_END = re.compile(r"^\*\*\*END OF (?:THE|THIS) PROJECT.*", re.MULTILINE)  # found when lines are joined
_CREDIT = re.compile(r"\s*(?:Produced by|E-text prepared|Etext prepared|Transcribed from)")


def _gutenberg(text: str) -> str:
    """An e-text of Project Gutenberg without its licence, its header and the line that says who made it."""
    text = _lines(text)
    if start := _START.search(text):
        text = text[start.end() :]
    if end := _END.search(text):
        text = text[: end.start()]
    text = text.strip()
    while _CREDIT.match(text):
        text = text.partition("\n\n")[2].strip()
    text = _unwrap(text + "\n")
    if end := _LATE_END.search(text):
        text = text[: end.start()]
    return text


def _tei(text: str) -> str:
    """The text of TEI XML: what ends a paragraph, a line of verse or a division ends one here."""
    body = re.search(r"<text\b.*(?=</text>)", text, re.DOTALL)
    if body is None:
        raise DataError("no <text> of TEI in the file; check the repository out again")
    text = body.group()
    text = re.sub(r"<note\b.*?</note>", "", text, flags=re.DOTALL)
    text = re.sub(r"<(?:pb|lb|cb|milestone|gap)\b[^>]*>", "", text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"</(?:p|head|l|quote|div|label|trailer)>", "\n\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return "\n".join(line.strip() for line in text.split("\n"))


RULES: dict[str, Callable[[str], str]] = {
    "classic-books-markdown": _markdown,
    "ELTeC-eng": _tei,
    "100_english_novels": _plain,
    "gender_novels": _gutenberg,
}
