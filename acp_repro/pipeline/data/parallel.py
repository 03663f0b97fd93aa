"""Text to ids on every core, in the order of the documents.

Threads are enough, because the encoding library releases Python's lock while it works. Only making an array
of the ids takes the lock, a twenty-fifth of the time. Memory is bounded: each thread has at most two groups
of documents at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from acp_repro.common.command import usable_cores
from acp_repro.model.tokenizer import Tokenizer
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Document

_GROUP_BYTES = 1 << 20  # of text for one thread: small reviews go together, a book goes alone

Labelled = tuple[str, Document]  # a document with the name of its split


def tokenise(
    labelled: Iterable[Labelled], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[tuple[str, Document, np.ndarray]]:
    """Gives (split, document, ids) in the order of ``labelled``, the same for any ``workers``.

    Args:
        workers: the number of threads; by default the number of cores.

    Yields:
        ``ids`` is (tokens,) of unsigned integers.

    Raises:
        DataError: ``workers`` is below 1, or the documents cannot be read.
    """
    if workers is not None and workers < 1:
        raise DataError(f"workers: {workers} must be at least 1; leave it out to use every core")
    workers = workers or usable_cores()

    def encode(group: list[Labelled]) -> list[tuple[str, Document, np.ndarray]]:
        return [(split, document, tokenizer.encode(document.data)) for split, document in group]

    waiting: deque = deque()
    with ThreadPoolExecutor(workers) as threads:
        try:
            for group in _groups(labelled):
                waiting.append(threads.submit(encode, group))
                if len(waiting) > 2 * workers:  # a bound on the memory, not on the speed
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for group in waiting:  # the reader failed or the caller stopped: drop the rest
                group.cancel()


def _groups(labelled: Iterable[Labelled]) -> Iterator[list[Labelled]]:
    group, size = [], 0
    for one in labelled:
        group.append(one)
        size += len(one[1].data)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
