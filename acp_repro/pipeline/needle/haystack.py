"""Text to hide the needle in: the held-out text of a corpus, or any files."""

from collections.abc import Callable, Iterable

import numpy as np

from acp_repro.common.errors import UsageError
from acp_repro.pipeline.data import Corpus, LongCrawl64
from acp_repro.pipeline.data.sequences import HELDOUT_COLUMN
from acp_repro.pipeline.data.sources import Document, open_text
from acp_repro.pipeline.data.text_checkpoint import TextCheckpoint


def heldout_haystacks(
    corpus: Corpus | LongCrawl64, context_length: int, length: int, samples: int
) -> list[np.ndarray]:
    """``samples`` pieces (n,) int64 of at least ``length`` held-out tokens each, far apart if the
    text suffices. A piece consists of whole sequences of ``context_length`` tokens and may span several
    documents."""
    sequences = corpus.sequences("heldout", context_length)
    each = -(-length // context_length)
    needed, there = samples * each, len(sequences)
    if there < needed:
        raise UsageError(
            f"needle: {samples} haystacks of {length} tokens take {needed} held-out sequences of "
            f"{context_length} tokens, but there are {there}; use fewer samples or shorter lengths"
        )
    # Slices of one document are adjacent, so pieces are one column apart.
    stride = max(each, min(there // samples, -(-HELDOUT_COLUMN // context_length)))
    wanted = ((samples - 1) * stride + each) * context_length
    rows = [labels[0].numpy() for _, labels in sequences.iter_batches(1, wanted)]
    starts = range(0, samples * stride, stride)
    return [np.concatenate(rows[start : start + each]) for start in starts]


def text_haystacks(
    documents: Iterable[Document], encode: Callable[[str], np.ndarray], length: int, samples: int
) -> list[np.ndarray]:
    """``samples`` pieces (length,) int64 of concatenated texts, at evenly spaced offsets. The last piece may
    wrap around to the beginning; pieces overlap if the text is shorter than their total length."""
    wanted = samples * length
    # For a long corpus only the required part is read; essays are read completely.
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


def checkpoint_haystacks(
    checkpoint: TextCheckpoint, path: str | None, length: int, samples: int
) -> list[np.ndarray]:
    """Haystacks in the tokens of a checkpoint: from ``path``, else from its run's held-out text, else from a
    book."""
    if path is None and checkpoint.run is not None:
        return heldout_haystacks(checkpoint.corpus(), checkpoint.context_length, length, samples)
    documents = open_text(path, "--haystack").documents()
    return text_haystacks(documents, checkpoint.tokenizer.encode, length, samples)
