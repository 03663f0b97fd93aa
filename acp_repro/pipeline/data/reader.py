"""The documents of a config, each with its split."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from acp_repro.pipeline.data.config import DataConfig
from acp_repro.pipeline.data.sources import Document, TextSource, is_heldout

SPLITS = ("train", "heldout")


class Reader:
    """Reads a config's documents. Fetched text goes to ``cache``.

    Attributes:
        identity: a SHA-256 that stands for the text.
        skipped: files that are not text, and were left out.
    """

    def __init__(self, config: DataConfig, cache: Path | None = None):
        self._share = 0.0 if config.heldout_paths else float(config.heldout)
        self._heldout = None
        if config.heldout_paths:
            self._heldout = TextSource(config.heldout_paths, config.text_field, key="heldout")
        self._source = config.source(cache)
        sources = [self._source] + ([self._heldout] if self._heldout else [])
        self._size = sum(source.size for source in sources)
        self.identity = hash_of([source.identity for source in sources])
        self.skipped = [name for source in sources for name in source.skipped]

    def documents(self, doing: str) -> Iterator[tuple[str, Document]]:
        """Gives (split, document), behind a progress bar labelled ``doing``."""
        with tqdm(total=self._size, desc=doing, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            yield from self._split(self._source.documents(bar.update))
            if self._heldout:
                for document in self._heldout.documents(bar.update):
                    yield "heldout", document

    def _split(self, documents: Iterator[Document]) -> Iterator[tuple[str, Document]]:
        first = list(itertools.islice(documents, 2))
        if len(first) == 1 and self._share and (parts := tail_of(first[0], self._share)):
            yield from zip(SPLITS, parts, strict=True)
            return
        for document in itertools.chain(first, documents):
            yield SPLITS[is_heldout(document, self._share)], document


def tail_of(document: Document, share: float) -> tuple[Document, Document] | None:
    """A document without its last ``share`` (0 to 1) of bytes, and those bytes; None if either would be
    blank.

    The cut is in the first half of those bytes. It is at the first end of a paragraph, else of a line or a
    word, else between two characters.
    """
    data = document.data
    start = len(data) - int(len(data) * share)
    while start < len(data) and data[start] & 0xC0 == 0x80:  # inside a character of UTF-8
        start += 1
    for end in (rb"\n\s*\n", rb"\n", rb"\s"):
        if found := re.compile(end).search(data, max(start - 2, 0), (start + len(data)) // 2):
            start = found.end()
            break
    head, tail = data[:start], data[start:]
    if not head.strip() or not tail.strip():
        return None
    name = f"{document.name} (its tail)"
    return Document(document.name, head, head), Document(name, tail, tail)


def hash_of(facts: Any) -> str:
    """SHA-256 of a value of JSON's types."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
