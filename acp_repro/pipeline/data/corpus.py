"""Tokenises a corpus once and caches it: text -> cached tokens -> sequences."""

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

FORMAT = 1  # increment when the same text would produce other files
SPLITS = ("train", "heldout")
_GROUP_BYTES = 1 << 20  # text per task of a thread: small reviews are grouped, a book is a group of its own

Split = tuple[str, Document]  # a document with the name of its split


class Corpus:
    """A prepared corpus: its tokens on disk, its tokeniser, and sequences of any length.

    Attributes:
        config: the `DataConfig` of the corpus.
        folder: the folder of the cache entry.
        tokenizer: the tokeniser, which encodes and decodes, and has ``vocab_size`` and ``bos_id``.
    """

    def __init__(self, config: DataConfig, folder: Path, manifest: Mapping[str, Any]):
        self.config, self.folder = config, folder
        self._manifest = manifest
        self.tokenizer: Tokenizer = ByteTokenizer()
        if config.tokenizer != "bytes":
            self.tokenizer = BPETokenizer((folder / TOKENIZER_FILE).read_text("utf-8"))
        self.vocab_size, self.bos_id = self.tokenizer.vocab_size, self.tokenizer.bos_id

    def tokens(self, split: str) -> np.ndarray:
        """The split's tokens, memory-mapped: (tokens,) uint16, or uint32 for a large vocabulary."""
        return _map_array(self.folder / f"{split}.tokens", _token_dtype(self.vocab_size))

    def offsets(self, split: str) -> np.ndarray:
        """The starts of documents in `tokens`, and the end: (documents + 1,) int64."""
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
        """Provenance as JSON values.

        ``hash`` covers text, split and tokeniser. The ``sha256`` of a split is the hash of its tokens. A
        ``context_length`` adds the number of sequences of each split and the fraction (0 to 1) of its tokens
        that are in sequences.
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
        """Writes ``tokenizer.json`` into ``folder`` and returns its path; None for bytes, without a file."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return None
        return save_json(self.tokenizer.json_text, folder)


def prepare(config: DataConfig | Mapping[str, Any]) -> Corpus | LongCrawl64:
    """The corpus of ``config``. Unless it is in `default_cache`, it is tokenised now on all cores.

    The key of a cache entry is a hash of the text, so a changed file creates a new entry. If several
    processes call the function concurrently (torchrun), one builds the entry while the others wait.

    Args:
        config: a `DataConfig` or a mapping with its keys.
    """
    config = config if isinstance(config, DataConfig) else DataConfig(**config)
    if config.corpus == "longcrawl64":  # already tokenised, and far too large to copy
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
    """A name for the cache folder, and the part of the cache key that determines the ids besides the text."""
    if config.bpe_size:
        return f"bpe{config.bpe_size}", config.bpe_size
    if config.tokenizer_file:
        json_text = read_tokenizer(config.tokenizer_file)
        return "file", {"sha256": hashlib.sha256(json_text.encode()).hexdigest()}
    return config.tokenizer, None if config.tokenizer == "bytes" else config.tokenizer


class Reader:
    """Reads the documents of a config with their splits; ``identity`` is a hash of their text."""

    def __init__(self, config: DataConfig):
        self._share = 0.0 if config.heldout_paths else float(config.heldout)
        self._heldout = None
        if config.heldout_paths:  # opened first, so that an error names this key
            self._heldout = TextSource(config.heldout_paths, config.text_field, key="heldout")
        self._source = config.source()
        self.identity = hash_json([source.identity for source in (self._source, self._heldout) if source])

    def documents(self, doing: str) -> Iterator[Split]:
        """Yields (split, document) with a progress bar labelled ``doing``."""
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
            else f"{config.function.place(config.path)} contains no text; it is empty or blank"
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
    """Yields (split, document, ids) in the order of ``documents``, independent of the number of threads.

    Threads suffice, because the tokeniser library releases the GIL while it encodes. Only the conversion of
    ids to an array, 4 % of the time, needs the GIL. Each thread is assigned at most four groups of documents
    at a time, which bounds the memory.
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
    """The file as a read-only, memory-mapped array (n,) of ``dtype``."""
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _token_dtype(vocab_size: int) -> str:
    return "<u4" if vocab_size > 65536 else "<u2"
