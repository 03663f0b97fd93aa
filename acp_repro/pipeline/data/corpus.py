"""Prepares a corpus once, so that it opens fast later: text -> tokens in a cache -> sequences."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from acp_repro.model.tokenizer import TOKENIZER_FILE, BPETokenizer, ByteTokenizer, Tokenizer
from acp_repro.pipeline.data.cache import Entry, EntryWriter, default_cache, open_or_build
from acp_repro.pipeline.data.config import DataConfig
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.longcrawl64 import LongCrawl64
from acp_repro.pipeline.data.parallel import tokenise
from acp_repro.pipeline.data.reader import SPLITS, Reader, hash_of
from acp_repro.pipeline.data.sequences import TokenSequences
from acp_repro.pipeline.data.sources import Document
from acp_repro.pipeline.data.tokenizer import gpt2_json, read_json, save_json, train_bpe

_log = logging.getLogger(__name__)
FORMAT = 1  # raise it if the same text would give other files


class Corpus:
    """A prepared corpus: its tokens on disk, its tokeniser, and sequences of any length.

    Attributes:
        config: the `DataConfig` that it was made from.
        folder: where it is cached.
        tokenizer: encodes and decodes, and has ``vocab_size`` and ``bos_id``.
    """

    def __init__(self, config: DataConfig, entry: Entry):
        self.config, self.folder = config, entry.folder
        self._entry = entry
        self.tokenizer: Tokenizer = ByteTokenizer()
        if config.tokenizer != "bytes":
            self.tokenizer = BPETokenizer((entry.folder / TOKENIZER_FILE).read_text("utf-8"))
        self.vocab_size, self.bos_id = self.tokenizer.vocab_size, self.tokenizer.bos_id

    def tokens(self, split: str) -> np.ndarray:
        """The split's tokens, memory-mapped: (tokens,) uint16, or uint32 if ids need it."""
        return self._entry.array(f"{_known(split)}.tokens", _token_dtype(self.vocab_size))

    def offsets(self, split: str) -> np.ndarray:
        """Where documents start in `tokens`, and the end: (documents + 1,) int64."""
        return self._entry.array(f"{_known(split)}.offsets", "<i8")

    def names(self, split: str) -> list[str]:
        """The documents' names, in the order of `offsets`."""
        return self._names[_known(split)]

    @functools.cached_property
    def _names(self) -> dict[str, list[str]]:
        return json.loads((self.folder / "names.json").read_bytes())

    def sequences(self, split: str, context_length: int, seed: int = 0) -> TokenSequences:
        """The split's sequences of ``context_length`` tokens; see `TokenSequences`.

        Raises:
            DataError: no document is that long, or ``split`` is heldout and ``heldout: 0`` holds out nothing.
        """
        if _known(split) == "heldout":
            self.config.require_heldout()
        return TokenSequences(
            self.tokens(split),
            self.offsets(split),
            context_length,
            split,
            seed,
            bos_id=self.bos_id,
            name_of=lambda document: self.names(split)[document],
        )

    def describe(self, context_length: int | None = None) -> dict[str, Any]:
        """Facts for provenance, in JSON's types.

        ``hash`` stands for text, split and tokeniser together. A split's ``sha256`` is that of its tokens. A
        ``context_length`` adds, to each split, the number of its sequences and the share (0 to 1) of tokens
        in them.

        Raises:
            DataError: ``context_length`` is below 1.
        """
        if context_length is not None and context_length < 1:
            raise DataError(f"context_length: {context_length} is no length; use 1 or more")
        facts = {
            "corpus": self.config.corpus,
            "identity": self._entry.facts["identity"],
            "hash": self._entry.key,
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.vocab_size,
            "splits": {
                name: {
                    **self._entry.facts["splits"][name],
                    "sha256": self._entry.files[f"{name}.tokens"]["sha256"],
                }
                for name in SPLITS
            },
        }
        if context_length is not None:
            for name, split in facts["splits"].items():
                used = np.diff(self.offsets(name)) // context_length
                split["sequences"] = int(used.sum())
                # an empty split has no share, and none of it is used
                split["share_used"] = split["sequences"] * context_length / (split["tokens"] or 1)
        return facts

    def save_tokenizer(self, folder: str | Path) -> Path | None:
        """Writes ``tokenizer.json`` into ``folder``, for a model that leaves this machine.

        ``tokenizer: {file: PATH}`` and ``python -m acp_repro.inspect`` read it.

        Returns:
            Its path, or None for bytes, which need no file.
        """
        if isinstance(self.tokenizer, ByteTokenizer):
            return None
        return save_json(self.tokenizer.json_text, folder)


def prepare(
    config: DataConfig | Mapping[str, Any], cache_dir: str | Path | None = None, workers: int | None = None
) -> Corpus | LongCrawl64:
    """The corpus of ``config``. It is tokenised now unless the cache has it.

    The entry's key is a hash of the text, so a changed file makes a new entry. If several processes call at
    once (torchrun), one builds while the others wait.

    Args:
        config: a `DataConfig` or a mapping with its keys.
        cache_dir: by default the environment's ``ACP_REPRO_CACHE``, else ``cache/`` in the project folder.
        workers: the number of threads that tokenise, by default one a core. It changes no byte.

    Raises:
        DataError: the settings, the text or the tokeniser cannot be used.
    """
    config = DataConfig.from_dict(config)
    if config.corpus == "longcrawl64":  # tokens already, and far too many to copy
        return LongCrawl64(config)
    folder = default_cache() if cache_dir is None else Path(cache_dir).expanduser()
    reader = Reader(config, folder)
    tokens, fact = _tokenizer_facts(config)
    key = hash_of(
        {
            "format": FORMAT,
            "identity": reader.identity,
            "heldout": "paths" if config.heldout_paths else float(config.heldout),
            "bpe": fact,
        }
    )
    entry = open_or_build(
        folder / f"{config.corpus}-{tokens}-{key[:16]}",
        key,
        functools.partial(_build, config, reader, workers),
    )
    return Corpus(config, entry)


def _tokenizer_facts(config: DataConfig) -> tuple[str, Any]:
    """A name for the folder, and for the cache's key all that decides the ids, except the text."""
    if config.bpe_size:
        return f"bpe{config.bpe_size}", config.bpe_size
    if config.tokenizer_file:
        json_text = read_json(config.tokenizer_file)
        return "file", {"sha256": hashlib.sha256(json_text.encode()).hexdigest()}
    return config.tokenizer, None if config.tokenizer == "bytes" else config.tokenizer


def _build(config: DataConfig, reader: Reader, workers: int | None, writer: EntryWriter) -> dict[str, Any]:
    """Writes tokens, offsets, names and tokeniser; gives the entry's facts."""
    tokenizer: Tokenizer = ByteTokenizer()
    if config.tokenizer != "bytes":
        tokenizer = BPETokenizer(_tokenizer_json(config, reader))
        writer.append(TOKENIZER_FILE, tokenizer.json_text.encode())
    splits = {name: {"documents": 0, "bytes": 0, "tokens": 0, "longest": 0} for name in SPLITS}
    names: dict[str, list[str]] = {name: [] for name in SPLITS}
    dtype = _token_dtype(tokenizer.vocab_size)
    for name in SPLITS:
        writer.append(f"{name}.tokens", b"")  # a split may stay empty; its files are there
        writer.append(f"{name}.offsets", np.zeros(1, "<i8"))
    for split, document, ids in tokenise(reader.documents("tokenising"), tokenizer, workers):
        facts = splits[split]
        facts["documents"] += 1
        facts["bytes"] += len(document.data)
        facts["tokens"] += len(ids)
        facts["longest"] = max(facts["longest"], len(ids))
        names[split].append(document.name)
        writer.append(f"{split}.tokens", ids.astype(dtype))
        writer.append(f"{split}.offsets", np.array([facts["tokens"]], "<i8"))
    _check_splits(config, {name: facts["documents"] for name, facts in splits.items()})
    if reader.skipped:
        count = len(reader.skipped)
        names_of = ", ".join(reader.skipped[:3]) + (", ..." if count > 3 else "")
        _log.warning(
            "skipped %s not text: %s", f"{count} files that are" if count > 1 else "1 file that is", names_of
        )
    writer.append("names.json", json.dumps(names).encode())
    return {"identity": reader.identity, "splits": splits}


def _tokenizer_json(config: DataConfig, reader: Reader) -> str:
    if config.tokenizer_file:
        return read_json(config.tokenizer_file)
    if config.tokenizer == "gpt2":
        return gpt2_json()
    return train_bpe(_training_documents(config, reader), config.bpe_size)


def _training_documents(config: DataConfig, reader: Reader) -> Iterator[Document]:
    """The documents that a tokeniser learns from. If there are none, the error names the text, not the
    ids."""
    documents = dict.fromkeys(SPLITS, 0)
    for split, document in reader.documents("learning BPE"):
        documents[split] += 1
        if split == "train":
            yield document
    _check_splits(config, documents)


def _check_splits(config: DataConfig, documents: dict[str, int]) -> None:
    train, heldout = (documents[name] for name in SPLITS)
    if not train + heldout:
        raise DataError(f"{config.function.place(config.path)} holds no text, only blank documents")
    if config.heldout and not heldout:
        raise DataError(
            f"heldout: {config.heldout} leaves no held-out document of {train}; use a larger share or more "
            "text, name files (heldout: PATH), or set 0 to hold out none"
        )
    if not train:
        raise DataError(
            f"heldout: {config.heldout} leaves no training document of {heldout}; use "
            "a smaller share, or more documents"
        )


def _token_dtype(vocab_size: int) -> str:
    return "<u4" if vocab_size > 65536 else "<u2"


def _known(split: str) -> str:
    if split not in SPLITS:
        raise DataError(f"split: {split!r} is not known; use train or heldout")
    return split
