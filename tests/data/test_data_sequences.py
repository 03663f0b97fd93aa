"""Sequences: slices of one document, in column order, which depend only on seed and step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.pipeline.data import DataError, TokenSequences
from acp_repro.pipeline.data import sequences as module

BOS = 60_000


def make(lengths, context_length, seed=0, split="train"):
    """Each token equals its global position, so a batch shows its boundaries."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    return TokenSequences(tokens, offsets, context_length, split, seed, bos_id=BOS)


lengths_and_context = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 9)
).filter(lambda x: max(x[0]) >= x[1])


@settings(max_examples=60, deadline=None)
@given(lengths_and_context, st.integers(0, 2**40), st.integers(0, 3))
def test_epoch_contains_each_slice_once_column_by_column(case, seed, epoch):
    lengths, context = case
    sequences = make(lengths, context, seed)
    order = [tuple(row) for row in sequences.epoch_order(epoch).tolist()]
    every = [(d, s) for d, n in enumerate(lengths) for s in range(n // context)]
    assert len(sequences) == len(order) and sorted(order) == every
    # each column has the documents in the order of the first one
    rank = {d: i for i, (d, s) in enumerate(order) if s == 0}
    assert order == sorted(order, key=lambda place: (place[1], rank[place[0]]))
    facts = module.describe_split(np.array(lengths), context)
    assert (facts["sequences"], facts["tokens"]) == (len(order), sum(lengths))
    assert facts["share_used"] == len(order) * context / sum(lengths)


@settings(max_examples=40, deadline=None)
@given(lengths_and_context, st.integers(1, 50), st.integers(0, 20))
def test_batch_consists_of_shifted_slices_of_the_infinite_order(case, batch_size, step):
    lengths, context = case
    sequences = make(lengths, context, 3)
    inputs, labels = sequences.batch(step, batch_size)
    assert inputs.shape == labels.shape == (batch_size, context)
    assert inputs.dtype == labels.dtype == torch.int64
    assert (inputs[:, 0] == BOS).all()
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    starts = np.cumsum([0, *lengths])
    for row, label in enumerate(labels.tolist()):
        epoch, i = divmod(step * batch_size + row, len(sequences))
        d, s = make(lengths, context, 3).epoch_order(epoch)[i]  # a new object without state
        first = starts[d] + s * context
        assert label == list(range(first, first + context)) and first + context <= starts[d + 1]


def test_order_is_fixed_across_versions():
    """Runs are compared across versions of numpy and this package, so these numbers are fixed."""
    sequences = make([4, 9, 0, 8, 5], 4, seed=1)
    assert sequences.epoch_order(0).tolist() == [[0, 0], [1, 0], [4, 0], [3, 0], [1, 1], [3, 1]]
    orders = [make([8] * 50, 8, seed).epoch_order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@settings(max_examples=40, deadline=None)
@given(lengths_and_context, st.integers(1, 7), st.integers(0, 400))
def test_heldout_covers_its_budget_once_in_a_fixed_order(case, batch_size, max_tokens):
    lengths, context = case
    sequences = make(lengths, context, seed=1, split="heldout")
    rows = min(len(sequences), max_tokens // context)
    if not rows:
        with pytest.raises(DataError, match="less than one sequence"):
            next(iter(sequences.iter_batches(batch_size, max_tokens)))
        return
    batches = list(counted := sequences.iter_batches(batch_size, max_tokens))
    assert len(batches) == len(counted)
    assert all(x.shape == y.shape == (batch_size, context) for x, y in batches[:-1])
    labels = torch.cat([y for _, y in batches])
    assert labels.shape == (rows, context) and len(set(labels[:, 0].tolist())) == rows
    other = torch.cat([y for _, y in make(lengths, context, 9).iter_batches(100, max_tokens)])
    assert torch.equal(labels, other)  # independent of seed and batch size


def test_heldout_iterates_over_documents_in_wide_columns(monkeypatch):
    monkeypatch.setattr(module, "HELDOUT_COLUMN", 8)
    order = make([20, 9, 16], 4).heldout_order().tolist()
    assert order == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1], [0, 2], [0, 3], [2, 2], [2, 3], [0, 4]]
    assert make([40], 12).heldout_order().tolist() == [[0, 0], [0, 1], [0, 2]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=20), st.integers(1, 20), st.sampled_from([4, 16, 65536])
)
def test_every_context_length_uses_the_same_text(lengths, budget, column):
    if max(lengths) < 8:
        lengths = [*lengths, 8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HELDOUT_COLUMN", column)
        seen = [
            torch.cat(
                [y.flatten() for _, y in make(lengths, context).iter_batches(3, 8 * budget, same_text_as=8)]
            )
            for context in (1, 2, 4, 8)
        ]
    assert all(torch.equal(seen[0], other) for other in seen)


def test_context_longer_than_every_document_is_reported_in_one_line():
    with pytest.raises(DataError, match="no train document has context_length = 10 .* longest of 3 has 9"):
        make([3, 9, 5], 10)
    with pytest.raises(DataError, match="no heldout document .* longest of 0 has 0"):
        make([], 10, split="heldout")
