"""Two tasks from the book that the project includes, for machines without data and network.

The tasks are not in the paper. ``book_perplexity`` is constructed like WikiText. ``book_last_word`` is
constructed like LAMBADA: the model predicts the last word of a passage, which occurs earlier in the passage.
No human has checked the items.
"""

import re
from collections.abc import Iterator
from typing import Any

from acp_repro.pipeline.data import sample_text

_PAGE_CHARACTERS = 3000
_PASSAGE_WORDS = 60  # passages of LAMBADA have 75 words on average
_LAST_WORD = re.compile(
    r"^(.*\s)([A-Za-z]{5,})[.!?][\"'”’]?$", re.DOTALL
)  # shorter words are mostly function words


def book_perplexity() -> list[dict[str, Any]]:
    """Documents with one key, ``page``: whole paragraphs of the book, about 3,000 characters."""
    pages, page = [], ""
    for paragraph in _paragraphs():
        page += ("\n\n" if page else "") + paragraph
        if len(page) >= _PAGE_CHARACTERS:
            pages.append({"page": page})
            page = ""
    return pages


def book_last_word() -> list[dict[str, Any]]:
    """Documents with one key, ``text``: passages of at least 60 words whose last word also occurs in an
    earlier sentence of the passage."""
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
