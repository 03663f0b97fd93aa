"""Prepares a corpus once, so that it opens fast later: text -> tokens in a cache -> sequences."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from acp_repro.common.artifacts import open_or_build
from acp_repro.common.command import progress_bar, usable_cores
from acp_repro.common.digests import hash_json
from acp_repro.model.tokenizer import TOKENIZER_FILE, BPETokenizer, ByteTokenizer, Tokenizer
from acp_repro.pipeline.data.config import DEFAULT_HELDOUT, DataConfig
from acp_repro.pipeline.data.files import DataError, default_cache
from acp_repro.pipeline.data.longcrawl64 import LongCrawl64
from acp_repro.pipeline.data.sequences import TokenSequences, describe_split
from acp_repro.pipeline.data.sources import Document, TextSource, cut_tail, is_heldout
from acp_repro.pipeline.data.tokenizer import gpt2_json, read_tokenizer, save_json, train_bpe

FORMAT = 1  # raise it if the same text would give other files
SPLITS = ("train", "heldout")
_GROUP_BYTES = 1 << 20  # of text for one thread: small reviews go together, a book goes alone

Split = tuple[str, Document]  # a document with the name of its split


class Corpus:
    """A prepared corpus: its tokens on disk, its tokeniser, and sequences of any length.

    Attributes:
        config: the `DataConfig` that it was made from.
        folder: where it is cached.
        tokenizer: encodes and decodes, and has ``vocab_size`` and ``bos_id``.
    """

    def __init__(self, config: DataConfig, folder: Path, manifest: Mapping[str, Any]):
        self.config, self.folder = config, folder
        self._manifest = manifest
        self.tokenizer: Tokenizer = ByteTokenizer()
        if config.tokenizer != "bytes":
            self.tokenizer = BPETokenizer((folder / TOKENIZER_FILE).read_text("utf-8"))
        self.vocab_size, self.bos_id = self.tokenizer.vocab_size, self.tokenizer.bos_id

    def tokens(self, split: str) -> np.ndarray:
        """The split's tokens, memory-mapped: (tokens,) uint16, or uint32 if ids need it."""
        return _map_array(self.folder / f"{split}.tokens", _token_dtype(self.vocab_size))

    def offsets(self, split: str) -> np.ndarray:
        """Where documents start in `tokens`, and the end: (documents + 1,) int64."""
        return _map_array(self.folder / f"{split}.offsets", "<i8")

    def sequences(self, split: str, context_length: int, seed: int = 0) -> TokenSequences:
        """The split's sequences of ``context_length`` tokens; see `TokenSequences`."""
        if split == "heldout" and self.config.heldout == 0:
            raise DataError(
                f"heldout: 0 holds out no text to measure on; set a share such as {DEFAULT_HELDOUT}"
            )
        return TokenSequences(
            self.tokens(split), self.offsets(split), context_length, split, seed, bos_id=self.bos_id
        )

    def describe(self, context_length: int | None = None) -> dict[str, Any]:
        """Facts for provenance, in JSON's types.

        ``hash`` stands for text, split and tokeniser together. A split's ``sha256`` is that of its tokens. A
        ``context_length`` adds, to each split, the number of its sequences and the share (0 to 1) of tokens
        in them.
        """
        manifest = self._manifest
        splits = {
            name: facts
            | {"sha256": manifest["sha256"][f"{name}.tokens"]}
            | describe_split(np.diff(self.offsets(name)), context_length)
            for name, facts in manifest["splits"].items()
        }
        return {
            "corpus": self.config.corpus,
            "identity": manifest["identity"],
            "hash": hash_json(manifest["inputs"]),
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.vocab_size,
            "splits": splits,
        }

    def save_tokenizer(self, folder: str | Path) -> Path | None:
        """Writes ``tokenizer.json`` into ``folder`` and gives its path; bytes need no file: None."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return None
        return save_json(self.tokenizer.json_text, folder)


def prepare(config: DataConfig | Mapping[str, Any]) -> Corpus | LongCrawl64:
    """The corpus of ``config``. It is tokenised now, on all cores, unless `default_cache` has it.

    The entry's key is a hash of the text, so a changed file makes a new entry. If several processes call at
    once (torchrun), one builds while the others wait.

    Args:
        config: a `DataConfig` or a mapping with its keys.
    """
    config = config if isinstance(config, DataConfig) else DataConfig(**config)
    if config.corpus == "longcrawl64":  # tokens already, and far too many to copy
        return LongCrawl64(config)
    reader = Reader(config)
    tokens, fact = _tokenizer_facts(config)
    inputs = {
        "format": FORMAT,
        "identity": reader.identity,
        "heldout": "paths" if config.heldout_paths else float(config.heldout),
        "bpe": fact,
    }
    path = default_cache() / f"{config.corpus}-{tokens}-{hash_json(inputs)[:16]}"
    return Corpus(config, path, open_or_build(path, inputs, functools.partial(_build, config, reader)))


def _tokenizer_facts(config: DataConfig) -> tuple[str, Any]:
    """A name for the folder, and for the cache's key all that decides the ids, except the text."""
    if config.bpe_size:
        return f"bpe{config.bpe_size}", config.bpe_size
    if config.tokenizer_file:
        json_text = read_tokenizer(config.tokenizer_file)
        return "file", {"sha256": hashlib.sha256(json_text.encode()).hexdigest()}
    return config.tokenizer, None if config.tokenizer == "bytes" else config.tokenizer


class Reader:
    """Reads a config's documents, each with its split; ``identity`` stands for their text."""

    def __init__(self, config: DataConfig):
        self._share = 0.0 if config.heldout_paths else float(config.heldout)
        self._heldout = None
        if config.heldout_paths:  # first, so that an error names this key
            self._heldout = TextSource(config.heldout_paths, config.text_field, key="heldout")
        self._source = config.source()
        self.identity = hash_json([source.identity for source in (self._source, self._heldout) if source])

    def documents(self, doing: str) -> Iterator[Split]:
        """Gives (split, document), behind a progress bar labelled ``doing``."""
        with progress_bar(desc=doing, unit="B", unit_scale=True, leave=False) as bar:
            for split, document in self._split():
                yield split, document
                bar.update(len(document.data))

    def _split(self) -> Iterator[Split]:
        documents = self._source.documents()
        first = list(itertools.islice(documents, 2))
        if len(first) == 1 and self._share and (parts := cut_tail(first[0], self._share)):
            yield from zip(SPLITS, parts, strict=True)
            return
        for document in itertools.chain(first, documents):
            yield SPLITS[is_heldout(document.split_key, self._share)], document
        for document in self._heldout.documents() if self._heldout else ():
            yield "heldout", document


def _build(config: DataConfig, reader: Reader, folder: Path) -> dict[str, Any]:
    """Writes tokens, offsets and tokeniser into ``folder``; returns the facts of the manifest."""
    tokenizer: Tokenizer = ByteTokenizer()
    if config.tokenizer != "bytes":
        tokenizer = BPETokenizer(_tokenizer_json(config, reader))
        save_json(tokenizer.json_text, folder)
    dtype = _token_dtype(tokenizer.vocab_size)
    lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.tokens").open("wb")) for split in SPLITS}
        for split, document, ids in tokenise(reader.documents("tokenising"), tokenizer):
            files[split].write(ids.astype(dtype))
            lengths[split].append(len(ids))
            sizes[split] += len(document.data)
    for split in SPLITS:
        (folder / f"{split}.offsets").write_bytes(np.cumsum([0, *lengths[split]], dtype="<i8"))
    train, heldout = (len(lengths[split]) for split in SPLITS)
    if not train or (config.heldout and not heldout):
        raise DataError(
            f"{config.function.place(config.path)}: heldout: {config.heldout} leaves {train} documents for "
            f"training and holds out {heldout}; use another share, or more text"
            if train or heldout
            else f"{config.function.place(config.path)} holds no text; it is empty or blank"
        )
    return {"identity": reader.identity, "splits": {split: {"bytes": sizes[split]} for split in SPLITS}}


def _tokenizer_json(config: DataConfig, reader: Reader) -> str:
    if config.tokenizer_file:
        return read_tokenizer(config.tokenizer_file)
    if config.tokenizer == "gpt2":
        return gpt2_json()
    documents = (document for split, document in reader.documents("learning BPE") if split == "train")
    return train_bpe(documents, config.bpe_size)


def tokenise(
    documents: Iterable[Split], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[tuple[str, Document, np.ndarray]]:
    """Gives (split, document, ids) in the order of ``documents``, the same for any number of threads.

    Threads are enough, because the encoding library releases Python's lock while it works. Only making an
    array of the ids takes the lock, a twenty-fifth of the time. Each thread has at most four groups of
    documents at a time, which bounds the memory.
    """
    workers = workers or usable_cores()

    def encode(group: list[Split]) -> list[tuple[str, Document, np.ndarray]]:
        return [(split, document, tokenizer.encode(document.data)) for split, document in group]

    groups = _groups(documents)
    with ThreadPoolExecutor(workers) as threads:
        while together := list(itertools.islice(groups, 4 * workers)):
            for encoded in threads.map(encode, together):
                yield from encoded


def _groups(documents: Iterable[Split]) -> Iterator[list[Split]]:
    group, size = [], 0
    for one in documents:
        group.append(one)
        size += len(one[1].data)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _map_array(path: Path, dtype: str) -> np.ndarray:
    """The file as a read-only, memory-mapped vector (n,) of ``dtype``."""
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _token_dtype(vocab_size: int) -> str:
    return "<u4" if vocab_size > 65536 else "<u2"
