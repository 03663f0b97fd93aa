"""The plain text of a book, from its file in one of the four repositories that `books` reads.

The rules made the suites' shards, byte by byte, and the records and the committed model come from these
shards. So do not improve a rule, even if its flaw is plain.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Callable

from acp_repro.data.files import DataError

_WRAPPED = 55  # characters: a paragraph whose lines are mostly this long was broken to fit a page


def read(data: bytes, source: str) -> str:
    """The text of a file's bytes, with one line end at its end; ``source`` is a key of `RULES`.

    Raises:
        DataError: the file does not have the layout of its source.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    return _tidy(RULES[source](text))


def _lines(text: str) -> str:
    """The text with line ends of Unix, without blanks at the ends of lines and without byte-order marks."""
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip(" \t") for line in text.split("\n"))


def _tidy(text: str) -> str:
    """The text with at most two blank lines together, and none at its ends."""
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def _unwrap(text: str) -> str:
    """Joins each paragraph that was broken into lines of a page into one line. Verse and tables stay.

    A second blank line counts as the first line of the next paragraph, with no length. So it keeps two lines
    apart.
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
    """An e-text of Project Gutenberg without its licence, its header and the line that names its makers."""
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
    """The text of TEI XML. A tag that ends a paragraph, a line of verse or a division ends a line here."""
    body = re.search(r"<text\b.*(?=</text>)", text, re.DOTALL)
    if body is None:
        raise DataError("no <text> of TEI in the file; check out the repository again")
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
