"""Two tasks from the book that comes with the project, for machines without data and without a network.

They are not the paper's. ``book_perplexity`` is made like WikiText. ``book_last_word`` is made like LAMBADA:
the last word of a passage, which occurred in the passage before. Neither has a human check.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from acp_repro.pipeline.data import sample_text

_PAGE_CHARACTERS = 3000
_PASSAGE_WORDS = 60  # LAMBADA's have 75 in the mean
_LAST_WORD = re.compile(
    r"^(.*\s)([A-Za-z]{5,})[.!?][\"'”’]?$", re.DOTALL
)  # short ones are mostly function words


def book_perplexity() -> list[dict[str, Any]]:
    """Pieces of the book, whole paragraphs of about 3,000 characters: ``page``."""
    pages, page = [], ""
    for paragraph in _paragraphs():
        page += ("\n\n" if page else "") + paragraph
        if len(page) >= _PAGE_CHARACTERS:
            pages.append({"page": page})
            page = ""
    return pages


def book_last_word() -> list[dict[str, Any]]:
    """Passages of 60 words or more whose last word also stands in an earlier sentence of the passage:
    ``text``."""
    passages: list[dict[str, Any]] = []
    sentences: list[str] = []
    for sentence in _sentences():
        sentences.append(sentence)
        while len(" ".join(sentences[1:]).split()) >= _PASSAGE_WORDS:
            del sentences[0]
        text = " ".join(sentences)
        match = _LAST_WORD.match(text)
        if match is None or len(text.split()) < _PASSAGE_WORDS:
            continue
        if re.search(rf"\b{match[2]}\b", " ".join(sentences[:-1])):
            passages.append({"text": match[1] + match[2]})
            sentences = []
    return passages


def _paragraphs() -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", sample_text()):
        line = " ".join(paragraph.split())
        if line.strip("*# "):
            yield line


def _sentences() -> Iterator[str]:
    for paragraph in _paragraphs():
        yield from re.split(r"(?<=[.!?][\"'”’])\s+|(?<=[.!?])\s+", paragraph)
