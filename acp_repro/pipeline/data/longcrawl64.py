"""LongCrawl64, the paper's corpus: two zarr arrays of GPT-2 ids, read slice by slice without a copy.

The arrays are ``train.zarr`` (6,609,334 x 65,536) and ``heldout.zarr`` (52,131 x 65,536), in zarr format 2 or
3, with one document per row. Training proceeds column by column without a shuffle: first the first slices of
all documents in the order of the rows, then the second slices. The seed of a run therefore changes its
weights and not its data. The text was escaped as in JSON before tokenisation: a line end is ``\\n``.

In the published arrays a chunk contains at least a whole document. The rest of the chunk decoded for one
slice is needed again only six million documents later, which no cache can cover. Recently decoded chunks are
cached for neighbouring documents of one chunk, and for the slices of one held-out document, which are
consecutive. Reading decodes at most one chunk per document, however short the slice.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from acp_repro.model import BPETokenizer
from acp_repro.pipeline.data.config import GPT2_VOCAB_SIZE, DataConfig
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sequences import Sequences, describe_split
from acp_repro.pipeline.data.tokenizer import gpt2_json, read_tokenizer, save_json

_log = logging.getLogger(__name__)
_CACHE_BYTES = 256 << 20  # cache of decoded chunks, per array


class LongCrawl64:
    """The corpus at ``config.path``, with the interface of `Corpus` except an array of all tokens."""

    vocab_size, bos_id = GPT2_VOCAB_SIZE, GPT2_VOCAB_SIZE - 1

    def __init__(self, config: DataConfig):
        self.config, self.folder = config, Path(config.path).expanduser()
        self._arrays = {split: ChunkedTokens(self.folder / f"{split}.zarr") for split in ("train", "heldout")}

    @functools.cached_property
    def tokenizer(self) -> BPETokenizer:
        """GPT-2's tokeniser, which decodes ids and encodes prompts."""
        file = self.config.tokenizer_file
        tokenizer = BPETokenizer(read_tokenizer(file) if file else gpt2_json())
        if tokenizer.name != "gpt2":
            raise DataError(f"tokenizer: file: {file} is not GPT-2's tokenizer, whose ids LongCrawl64 has")
        return tokenizer

    def save_tokenizer(self, folder: str | Path) -> Path | None:
        try:
            return save_json(self.tokenizer.json_text, folder)
        except DataError as error:
            _log.warning("%s has no tokenizer.json: %s", folder, error)
            return None

    def offsets(self, split: str) -> np.ndarray:
        """The starts of documents in a concatenated array, and its end: (documents + 1,) int64."""
        documents, length = self._arrays[split].shape
        return np.arange(documents + 1, dtype=np.int64) * length

    def sequences(self, split: str, context_length: int, seed: int = 0) -> ColumnSequences:
        """The split's sequences of ``context_length`` tokens, which need not divide 65,536."""
        return ColumnSequences(self._arrays[split], context_length, split, seed)

    def describe(self, context_length: int | None = None) -> dict[str, Any]:
        """Provenance as in `Corpus.describe`; ``hash`` covers the shapes and each array's first and last row.

        Hashing all 870 GB would take an hour. The size of the text in bytes is unknown and omitted.
        """
        splits = {
            split: describe_split(np.diff(self.offsets(split)), context_length) for split in self._arrays
        }
        return {
            "corpus": self.config.corpus,
            "identity": self._identity,
            "hash": self._identity,
            "tokenizer": "gpt2",
            "vocab_size": self.vocab_size,
            "splits": splits,
        }

    @functools.cached_property
    def _identity(self) -> str:
        digest = hashlib.sha256(b"longcrawl64")
        for array in self._arrays.values():
            digest.update(json.dumps(array.shape).encode())
            ends = np.array([[0, 0], [array.shape[0] - 1, 0]])
            digest.update(array.read(ends, array.shape[1]).astype("<i8").tobytes())
        return digest.hexdigest()


class ColumnSequences(Sequences):
    """Sequences, column by column, of an array whose rows are documents of equal length.

    The training order of the slices of six million documents is computed on demand and never stored.
    """

    def __init__(self, tokens: ChunkedTokens, context_length: int, split: str, seed: int = 0):
        lengths = np.full(tokens.shape[0], tokens.shape[1])
        super().__init__(lengths, context_length, split, seed, LongCrawl64.bos_id)
        self._tokens = tokens

    def _training_rows(self, first: int, size: int) -> np.ndarray:
        number = np.arange(first, first + size, dtype=np.int64) % len(self)
        column, document = np.divmod(number, len(self._lengths))
        return np.stack([document, column], axis=1)

    def _labels(self, order: np.ndarray) -> np.ndarray:
        return self._tokens.read(order, self.context_length)


class ChunkedTokens:
    """A zarr array of token ids (documents, length), read chunk by chunk with a cache of recent chunks."""

    def __init__(self, path: Path):
        self.path = path
        try:
            import zarr

            self._array = zarr.open_array(str(path), mode="r")
        except Exception as error:  # from the import, zarr, its codecs or JSON
            raise DataError(
                f"path: {path} cannot be read ({error}); the folder must contain train.zarr and "
                "heldout.zarr; run gsutil -m cp -r 'gs://longcrawl64/*.zarr' FOLDER and "
                "pip install '.[longcrawl64]'"
            ) from error
        if self._array.ndim != 2 or self._array.dtype.kind not in "iu":
            raise DataError(
                f"path: {path} is an array {self._array.shape} of {self._array.dtype}, not token ids "
                "(documents, length)"
            )
        self.shape: tuple[int, int] = self._array.shape
        chunk_bytes = math.prod(self._array.chunks) * self._array.dtype.itemsize
        cached_chunks = max(1, _CACHE_BYTES // chunk_bytes)
        self._chunk = functools.lru_cache(cached_chunks)(self._decode)

    def read(self, order: np.ndarray, length: int) -> np.ndarray:
        """The tokens (sequences, length) int64 of each row (document, slice) of ``order``."""
        rows, width = self._array.chunks
        labels = np.empty((len(order), length), np.int64)
        for label, (document, number) in zip(labels, order.tolist(), strict=True):
            done = 0
            while done < length:
                column, start = divmod(number * length + done, width)
                piece = self._chunk(document // rows, column)[document % rows, start:][: length - done]
                label[done : done + len(piece)] = piece
                done += len(piece)
        if labels.size and not 0 <= labels.min() <= labels.max() < GPT2_VOCAB_SIZE:
            raise DataError(
                f"{self.path} contains a token id outside of GPT-2's vocabulary near document {order[0, 0]}; "
                "copy it again"
            )
        return labels

    def _decode(self, row: int, column: int) -> np.ndarray:
        rows, width = self._array.chunks
        try:
            chunk = self._array[row * rows : (row + 1) * rows, column * width : (column + 1) * width]
        except Exception as error:  # each codec has its own error class
            raise DataError(
                f"{self.path}: chunk {row}.{column} cannot be decoded ({error}); copy it again"
            ) from error
        if not chunk.any():  # zarr reads a missing file as zeros
            raise DataError(f"{self.path}: chunk {row}.{column} is missing; copy the array again")
        return chunk
