"""Text to token ids: bytes, or byte-pair encoding trained on the corpus itself.

Both give every text back exactly, need no unknown token, and keep their last id for BOS, which
no text ever encodes to. Token files hold text only; BOS is put in front of each sequence.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from acp_repro.data.files import DataError
from acp_repro.data.sources import Document

SMALLEST_BPE = 256 + 2  # every byte, one merge, BOS
BPE_TRAINING_BYTES = 64 << 20  # merges hardly change after this much text
_PIECE_BYTES = 1 << 20


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is BOS."""

    name = "bytes"
    vocab_size = 257
    bos_id = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of ``text``: shape (tokens,), dtype uint8; BOS is never among them."""
        return np.frombuffer(_as_bytes(text), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; BOS says nothing, half a character becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if i != self.bos_id).decode(errors="replace")

    def encode_all(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """The ids of each document, in order."""
        return (self.encode(document.data) for document in documents)


class BPETokenizer:
    """Byte-level BPE in GPT-2's manner; ``vocab_size`` counts BOS, its last id.

    Made by `train_bpe`, kept as the JSON text of the `tokenizers` library.
    """

    def __init__(self, json_text: str):
        self._bpe = _library().Tokenizer.from_str(json_text)
        # BOS stays outside of the library's vocabulary, so no text can spell it.
        self.bos_id = self._bpe.get_vocab_size()
        self.vocab_size = self.bos_id + 1
        self.name = f"bpe{self.vocab_size}"

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of ``text``: shape (tokens,), dtype uint32; BOS is never among them."""
        ids = [
            # encode_batch_fast leaves out the character offsets, half of the work
            np.array(self._bpe.encode_batch_fast([piece.decode()])[0].ids, dtype=np.uint32)
            for piece in _pieces(_as_bytes(text))
        ]
        return np.concatenate(ids) if ids else np.empty(0, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; BOS says nothing, half a character becomes U+FFFD."""
        return self._bpe.decode([i for i in map(int, ids) if i != self.bos_id])

    def encode_all(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """The ids of each document, in order, several documents at a time.

        Threads are enough, since the library leaves Python's lock while it works, and they spare
        the caller what worker processes ask of a script. Results come in the order of the
        documents whatever the number of threads.
        """
        workers = _usable_cores()
        with ThreadPoolExecutor(workers) as pool:
            waiting: deque = deque()
            try:
                for document in documents:
                    waiting.append(pool.submit(self.encode, document.data))
                    if len(waiting) > 2 * workers:  # a bound on the memory, not on the speed
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:  # the reader failed or the caller stopped: drop the rest
                    future.cancel()


Tokenizer = ByteTokenizer | BPETokenizer


def train_bpe(documents: Iterable[Document], vocab_size: int) -> str:
    """The JSON text of a BPE with ``vocab_size`` ids, BOS included, trained on ``documents``.

    Of more than `BPE_TRAINING_BYTES` of text the documents with the smallest hashes are taken:
    a fair sample that does not depend on their order. The same documents give the same bytes.

    Raises:
        DataError: the text holds too few distinct pairs for that many ids.
    """
    library = _library()
    sample, size = [], 0  # a heap with the largest hash first
    for document in documents:
        heapq.heappush(sample, (-_small_hash(document.data), document.data))
        size += len(document.data)
        while size - len(sample[0][1]) >= BPE_TRAINING_BYTES:
            size -= len(heapq.heappop(sample)[1])
    bpe = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # BOS is ours
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    pieces = (piece.decode() for _, data in sorted(sample) for piece in _pieces(data))
    bpe.train_from_iterator(pieces, trainer)
    reached = bpe.get_vocab_size() + 1
    if reached != vocab_size:
        raise DataError(
            f"tokenizer: {size:,} bytes of training text give {reached} ids of the "
            f"{vocab_size} asked for; write {{bpe: {reached}}} or less, or add text"
        )
    return bpe.to_str()


def _small_hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"bpe" + data).digest()[:8], "big")


def _pieces(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces of about a megabyte that end with a line.

    The library keeps some hundred bytes for each token of one call, so a book goes through whole
    and a gigabyte in one file does not. No token spans two pieces; that is all that changes.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _PIECE_BYTES) + 1 or len(data)
        yield data[start:end]
        start = end


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # in a container, fewer than the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _library():
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(
            "tokenizer: {bpe: ...} needs the library `tokenizers`; "
            "pip install 'acp_repro[bpe]', or set tokenizer: bytes"
        ) from error
    return tokenizers
