"""Reads and splits the texts of a run, and forms batches of similar length."""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from acp_repro.lap import TextTokenizer
from acp_repro.lap.autoencoder import pad
from acp_repro.pipeline.data.corpora import find_corpus
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sequences import Epochs, batches_by_length
from acp_repro.pipeline.data.sources import Document, Row, Source, is_heldout
from acp_repro.pipeline.data.tokenizer import train_bpe

from .schema import TextsConfig

GROUP = 20  # batches per sorted group


class Labelled(NamedTuple):
    """A text and its label: 1, 0, or None if probing excludes the text."""

    text: str
    label: int | None


@dataclass(frozen=True)
class Texts:
    """The texts of both splits.

    Attributes:
        more: texts of ``extra_path``, only for training; texts of a split are excluded.
        hash: digest of all texts, splits and labels.
    """

    train: tuple[Labelled, ...]
    heldout: tuple[Labelled, ...]
    more: tuple[str, ...]
    hash: str


@functools.lru_cache(maxsize=2)
def load_texts(config: TextsConfig) -> Texts:
    """The texts of a config in the order of their source, without duplicates."""
    texts = dict.fromkeys(Labelled(text, _side(row, config)) for row, text in _clean(config.source()))
    sides: tuple[dict[str, Labelled], dict[str, Labelled]] = ({}, {})
    digest = hashlib.sha256()
    for text in texts:
        key = hashlib.sha256(text.text.encode()).digest()
        sides[is_heldout(text.text.encode(), config.heldout)].setdefault(text.text, text)
        digest.update(key + str(text.label).encode())
    digest.update(str(config.heldout).encode())
    train, heldout = sides
    place = config.function.place(config.path)
    if not train or not heldout:
        raise DataError(f"{place} has {len(texts)} texts, so a split is empty; add texts or change heldout")
    more: tuple[str, ...] = ()
    if config.extra_path is not None:
        source = find_corpus("file").open(config.extra_path, {"text_field": config.text_field})
        found = dict.fromkeys(text for _, text in _clean(source))
        more = tuple(text for text in found if text not in train and text not in heldout)
    for text in more:
        digest.update(text.encode())
    return Texts(tuple(train.values()), tuple(heldout.values()), more, digest.hexdigest())


def _clean(source: Source) -> Iterator[tuple[Row, str]]:
    """Yields rows and their texts without line breaks; empty texts are skipped."""
    for row in source.rows():
        text = " ".join(row.text.replace("<br />", " ").split())  # IMDb contains HTML line breaks
        if text:
            yield row, text


def _side(row: Row, config: TextsConfig) -> int | None:
    if row.label is None or not config.sides:
        return None
    try:
        value = float(row.label) if row.number is None else row.number
    except ValueError:
        place = config.function.place(config.path)
        advice = ", or name another label_field" if config.label_field else ""
        raise DataError(
            f"{place}: the label {row.label!r} of {row.text[:40]!r} is not a number; write numbers{advice}"
        ) from None
    return 1 if value >= config.positive_from else 0 if value <= config.negative_to else None


def make_tokenizer(texts: Texts, vocabulary: int) -> TextTokenizer:
    """A byte-pair encoding of the training split, with ``<pad>`` and ``</s>``."""
    documents = (Document("", text.text.encode(), b"") for text in texts.train)
    # train_bpe counts a BOS that its file does not contain. Our two tokens replace the BOS.
    return TextTokenizer.with_special_tokens(train_bpe(documents, vocabulary - 1))


def encode(tokenizer: TextTokenizer, texts: list[str], max_length: int) -> list[list[int]]:
    """Ids with EOS of the texts that fit ``max_length``; empty texts are skipped."""
    rows = ([*ids, tokenizer.eos_id] for ids in tokenizer.encode_all(texts))
    return [row for row in rows if 1 < len(row) <= max_length]


class Batches:
    """Training batches of similar length: a function of seed and index alone.

    Args:
        rows: ids of each text, with EOS.
        size: texts per batch.
        pad_id: id of the padding token.
    """

    def __init__(self, rows: list[list[int]], size: int, pad_id: int, seed: int):
        if len(rows) < size:
            raise DataError(
                f"only {len(rows)} training texts fit the model, fewer than a batch of {size}; add texts or "
                "reduce it"
            )
        self._rows, self._size, self._pad, self._seed = rows, size, pad_id, seed
        self._epochs = Epochs(len(rows) // size, self._shuffled)

    def __call__(self, index: int, most: int | None = None) -> Tensor:
        """(size, T) int64, padded at the end.

        Args:
            most: longer rows are truncated to a random excerpt of this many tokens, including the final EOS.
        """
        rows = [self._rows[i] for i in self._epochs.take(index, 1)[0]]
        if most is not None:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
            shares = torch.rand(len(rows), generator=generator).tolist()
            rows = [_cut(row, most, share) for row, share in zip(rows, shares, strict=True)]
        return pad(rows, self._pad)

    def _shuffled(self, epoch: int) -> np.ndarray:
        """The batches of an epoch in random order, (batches, size) integer, each of similar lengths."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._rows), generator=generator).numpy()
        lengths = np.array([len(row) for row in self._rows])
        batches = np.stack(batches_by_length(order, lengths, self._size, GROUP))
        return batches[torch.randperm(len(batches), generator=generator).numpy()]


def _cut(row: list[int], most: int, share: float) -> list[int]:
    """An excerpt of ``row`` of at most ``most`` tokens that ends with the last token of the row; ``share``, 0
    to 1, sets its position."""
    if len(row) <= most:
        return row
    start = int(share * (len(row) - most + 1))
    return [*row[start : start + most - 1], row[-1]]
