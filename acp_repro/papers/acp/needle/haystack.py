"""Text to hide the needle in: the held-out text of a corpus, or any files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from acp_repro.common.errors import UsageError
from acp_repro.data import Corpus, LongCrawl64
from acp_repro.data.sequences import HELDOUT_COLUMN
from acp_repro.data.sources import Document, SampleSource, TextSource

from ..checkpoint_folder import Checkpoint


def heldout_haystacks(
    corpus: Corpus | LongCrawl64, context_length: int, length: int, samples: int
) -> list[np.ndarray]:
    """``samples`` pieces of at least ``length`` held-out tokens each, far apart where there is room.

    A piece is as many whole sequences of ``context_length`` as it takes, one after another in the fixed
    order of held-out text; a piece may go on in the next document.

    Returns:
        int64 arrays of token ids.

    Raises:
        UsageError: the held-out text is too short.
    """
    sequences = corpus.sequences("heldout", context_length)
    each = -(-length // context_length)
    needed, there = samples * each, len(sequences)
    if there < needed:
        raise UsageError(
            f"needle: {samples} haystacks of {length} tokens take {needed} held-out sequences of "
            f"{context_length}, and there are {there}; ask for fewer samples or shorter lengths"
        )
    # One document's slices come together, so pieces are a column of it apart.
    stride = max(each, min(there // samples, -(-HELDOUT_COLUMN // context_length)))
    rows = (
        labels[0].numpy()
        for _, labels in sequences.iter_batches(1, ((samples - 1) * stride + each) * context_length)
    )
    pieces = []
    for index, row in enumerate(rows):
        sample, within = divmod(index, stride)
        if within == 0:
            pieces.append([])
        if within < each:
            pieces[sample].append(row)
    return [np.concatenate(piece) for piece in pieces]


def text_haystacks(
    documents: Iterable[Document], encode: Callable[[str], np.ndarray], length: int, samples: int
) -> list[np.ndarray]:
    """``samples`` pieces of ``length`` tokens of texts that stand one after another, begun evenly apart.

    The last piece may go round to the beginning; pieces overlap where the text is shorter than all.

    Returns:
        int64 arrays of token ids.

    Raises:
        UsageError: the whole text is shorter than ``length``.
    """
    wanted = samples * length
    # Of a long corpus no more is read than is used; of essays, all.
    ids, there = [], 0
    for document in documents:
        ids.append(np.asarray(encode(document.data.decode()), np.int64))
        there += len(ids[-1])
        if there >= wanted:
            break
    text = np.concatenate([*ids, np.empty(0, np.int64)])
    if len(text) < length:
        raise UsageError(
            f"needle: the haystack's text has {len(text)} tokens, fewer than the longest context, {length}; "
            "give a longer text, or shorter lengths"
        )
    starts = [sample * len(text) // samples for sample in range(samples)]
    ring = np.concatenate([text, text[:length]])
    return [ring[start : start + length] for start in starts]


def file_haystacks(
    path: str, encode: Callable[[str], np.ndarray], length: int, samples: int, key: str
) -> list[np.ndarray]:
    """:func:`text_haystacks` of a file or folder; ``key`` names the setting in errors.

    Raises:
        DataError, UsageError: it is not there, no text, or too short.
    """
    return text_haystacks(TextSource([path], key=key).documents(), encode, length, samples)


def checkpoint_haystacks(
    checkpoint: Checkpoint, path: str | None, length: int, samples: int
) -> list[np.ndarray]:
    """Haystacks in the tokens of a checkpoint: of ``path``, else its run's held-out text, else a book.

    Raises:
        DataError, UsageError: there is no text, or it is too short.
    """
    if path is not None:
        return file_haystacks(path, checkpoint.tokenizer.encode, length, samples, "--haystack")
    if checkpoint.run is not None:
        return heldout_haystacks(checkpoint.corpus(), checkpoint.context_length, length, samples)
    return text_haystacks(SampleSource().documents(), checkpoint.tokenizer.encode, length, samples)


def fingerprints(haystacks: Iterable[np.ndarray]) -> list[str]:
    """What stands for these tokens in this order, in the key of results that are kept."""
    return [hashlib.sha256(haystack.tobytes()).hexdigest() for haystack in haystacks]
