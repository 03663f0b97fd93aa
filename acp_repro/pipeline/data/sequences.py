"""Splits tokenised documents into training and held-out sequences, by LongCrawl64's rules.

A sequence of L tokens is a slice of one document that starts at a multiple of L. The labels are these tokens,
and the input is BOS followed by all of them except the last. The remainder of a document after its last
complete slice is dropped. The training order is column by column: first the first slice of every document,
then the second, and so on. The held-out order is fixed.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from acp_repro.pipeline.data.files import DataError

if TYPE_CHECKING:
    import torch

# The column width in tokens of the held-out order, at every context length: the length of LongCrawl64's
# documents.
HELDOUT_COLUMN = 65536


def describe_split(lengths: np.ndarray, context_length: int | None = None) -> dict[str, Any]:
    """The number of documents and tokens and the longest document of a split, from the lengths (documents,)
    of its documents; with a context length also the number of sequences and the fraction (0 to 1) of tokens
    in sequences."""
    facts: dict[str, Any] = {"documents": len(lengths), "tokens": int(lengths.sum())}
    facts["longest"] = int(lengths.max(initial=0))
    if context_length is not None:
        facts["sequences"] = int((lengths // context_length).sum())
        facts["share_used"] = facts["sequences"] * context_length / (facts["tokens"] or 1)
    return facts


class Epochs:
    """The order of examples over unlimited epochs, each with its own order.

    Args:
        size: the number of examples, or batches, per epoch.
        order: computes the order of an epoch, (size, ...) integer, from the number of the epoch alone. The
            orders of the two latest epochs are cached, because a batch contains examples of at most two.
    """

    def __init__(self, size: int, order: Callable[[int], np.ndarray]):
        self._size, self.order = size, functools.lru_cache(maxsize=2)(order)

    def take(self, first: int, count: int) -> np.ndarray:
        """``count`` consecutive entries, (count, ...) integer, beginning at entry ``first`` of the run."""
        parts, end = [], first + count
        while first < end:
            epoch, start = divmod(first, self._size)
            parts.append(self.order(epoch)[start : start + end - first])
            first += len(parts[-1])
        return np.concatenate(parts)


def batches_by_length(order: np.ndarray, lengths: np.ndarray, size: int, sorted_together: int) -> list:
    """Batches of ``size`` examples of similar length, each an array (size,) of entries of ``order``.

    Args:
        order: (n,) integer, examples in random order.
        lengths: (examples,) integer, the length of every example.
        sorted_together: the number of consecutive batches whose examples are sorted by length. The longest
            examples of the last group are dropped if they do not fill a batch.
    """
    batches = []
    for first in range(0, len(order), sorted_together * size):
        group = order[first : first + sorted_together * size]
        group = group[np.argsort(lengths[group], kind="stable")]
        batches += [group[at : at + size] for at in range(0, len(group) - size + 1, size)]
    return batches


class Sequences(ABC):
    """The interface of a split for trainers and metrics: sequences of ``context_length`` tokens.

    Subclasses define the training order and read the tokens: `_training_rows`, `_labels`. The class is not
    thread-safe.

    Args:
        lengths: (documents,) int64, the number of tokens of each document.

    Attributes:
        context_length: L, the number of tokens per sequence.
        split: the name of the split, for messages.
        seed: the seed of the training order; the held-out order does not depend on it.
        bos_id: the first id of every input.
    """

    def __init__(self, lengths: np.ndarray, context_length: int, split: str, seed: int, bos_id: int):
        self.context_length, self.split, self.seed, self.bos_id = context_length, split, seed, bos_id
        self._lengths, self._slices = lengths, lengths // context_length
        self._count = int(self._slices.sum())
        if not self._count:
            raise DataError(
                f"no {split} document has context_length = {context_length} tokens: the longest of "
                f"{len(lengths)} has {lengths.max(initial=0)}; use a shorter context_length "
                "(--context-length), or longer documents"
                f"{' (or hold out other text, or none)' if split == 'heldout' else ''}"
            )

    def __len__(self) -> int:
        """The number of sequences per epoch."""
        return self._count

    def batch(self, step: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Training batch number ``step``, counted from 0, as (input_ids, labels).

        Both are int64 of shape (batch_size, L). The result depends only on the seed, the step and the batch
        size, so a resumed run reads the same batches.
        """
        return self._tensors(self._training_rows(step * batch_size, batch_size))

    def iter_batches(
        self, batch_size: int, max_tokens: int | None = None, same_text_as: int | None = None
    ) -> Batches:
        """Batches of all sequences in a fixed order, as (input_ids, labels); ``len`` is the number of
        batches.

        Both are int64 of shape (batch, L) with batch = ``batch_size``, or less for the last batch. The order
        begins with the first 65,536 tokens of every document, slice after slice, then the next 65,536. A
        small budget therefore covers many documents. It also covers the same text at every context length,
        except for the ends of documents, of which a shorter context drops less.

        Args:
            max_tokens: the budget: the batches contain as many complete sequences as fit, or all sequences.
            same_text_as: the longest context length of a comparison. The ends of documents are then dropped
                equally. If this length divides the budget, every context length that divides it reads exactly
                the same tokens.
        """
        order = self.heldout_order(max_tokens, same_text_as)
        if not len(order):
            raise DataError(
                f"{max_tokens} {self.split} tokens are less than one sequence of {self.context_length}"
            )
        return Batches(self, order, batch_size)

    def heldout_order(self, max_tokens: int | None = None, same_text_as: int | None = None) -> np.ndarray:
        """The order of `iter_batches`: (sequences, 2) int64 of (document, slice)."""
        length, grid = self.context_length, same_text_as or self.context_length
        assert grid % length == 0, "same_text_as must be a multiple of every context length"
        slices = self._lengths // grid * (grid // length)
        order = _slices_of(np.arange(len(slices)), slices)
        column = -(-HELDOUT_COLUMN // grid) * (grid // length)  # slices in a column
        order = order[np.argsort(order[:, 1] // column, kind="stable")]
        return order if max_tokens is None else order[: max_tokens // length]

    @abstractmethod
    def _training_rows(self, first: int, size: int) -> np.ndarray:
        """Sequences ``first`` to ``first + size`` of a run without end: (size, 2) of (document, slice)."""

    @abstractmethod
    def _labels(self, order: np.ndarray) -> np.ndarray:
        """The tokens of the slices in ``order``: (sequences, L) int64."""

    def _tensors(self, order: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        import torch  # imported late, because preparing a corpus does not need it

        labels = self._labels(order)
        inputs = np.empty_like(labels)
        inputs[:, 0] = self.bos_id
        inputs[:, 1:] = labels[:, :-1]
        return torch.from_numpy(inputs), torch.from_numpy(labels)


class Batches:
    """The batches of `Sequences.iter_batches`, with a known length; each iteration reads them again."""

    def __init__(
        self, sequences: Sequences, order: np.ndarray, size: int, device: torch.device | str | None = None
    ):
        self._sequences, self._order, self._size, self._device = sequences, order, size, device

    def __len__(self) -> int:
        return -(-len(self._order) // self._size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in range(0, len(self._order), self._size):
            batch = self._sequences._tensors(self._order[first : first + self._size])
            yield batch if self._device is None else tuple(x.to(self._device) for x in batch)

    def to(self, device: torch.device | str) -> Batches:
        """The same batches on ``device``."""
        return Batches(self._sequences, self._order, self._size, device)


class TokenSequences(Sequences):
    """The sequences of ``context_length`` tokens of documents in one array.

    Args:
        tokens: (tokens,) of any unsigned integer type, memory-mapped or not: the concatenated ids of the
            documents, without BOS.
        offsets: (documents + 1,) int64: document d is ``tokens[offsets[d]:offsets[d + 1]]``.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        context_length: int,
        split: str,
        seed: int = 0,
        *,
        bos_id: int,
    ):
        self._tokens, self._offsets = tokens, np.asarray(offsets, dtype=np.int64)
        super().__init__(np.diff(self._offsets), context_length, split, seed, bos_id)
        self._epochs = Epochs(len(self), self.epoch_order)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """The training order of an epoch: (sequences, 2) int64 of (document, slice).

        Each epoch has a new permutation of the documents, which all columns share.
        """
        # Raw bits of a specific generator: numpy guarantees their stability over versions, but not that of
        # permutation().
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
        documents = np.argsort(bits.random_raw(len(self._slices)), kind="stable")
        order = _slices_of(documents, self._slices[documents])
        return order[np.argsort(order[:, 1], kind="stable")]  # column by column

    def _training_rows(self, first: int, size: int) -> np.ndarray:
        return self._epochs.take(first, size)

    def _labels(self, order: np.ndarray) -> np.ndarray:
        starts = self._offsets[order[:, 0]] + order[:, 1] * self.context_length
        labels = np.empty((len(order), self.context_length), np.int64)
        for row, start in zip(labels, starts.tolist(), strict=True):
            row[:] = self._tokens[start : start + self.context_length]
        return labels


def _slices_of(documents: np.ndarray, slices: np.ndarray) -> np.ndarray:
    """(document, 0), (document, 1), ... for each of ``documents``, which has ``slices`` slices."""
    ends = np.cumsum(slices)
    within = np.arange(slices.sum(), dtype=np.int64) - np.repeat(ends - slices, slices)
    return np.stack([np.repeat(documents, slices), within], axis=1)
