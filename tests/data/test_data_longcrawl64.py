"""LongCrawl64 on small arrays of the same layout: the paper's order, shifted inputs, and damaged files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from acp_repro.pipeline.data import DataError, prepare
from acp_repro.pipeline.data.sequences import TokenSequences

zarr = pytest.importorskip("zarr", reason="pip install -e '.[longcrawl64]'")

BOS = 50256
LENGTH = 64  # of a document; the real ones have 65,536
TRAIN, HELDOUT = 13, 5
LAYOUTS = {
    "v2, a document a chunk, as published": {"chunks": (1, LENGTH), "zarr_format": 2},
    "v2, chunks across": {"chunks": (4, 24), "zarr_format": 2},
    "v3": {"chunks": (5, LENGTH), "zarr_format": 3},
    "v3, shards": {"chunks": (2, 32), "shards": (4, LENGTH), "zarr_format": 3},
}


def ids(documents, seed=0):
    return np.random.default_rng(seed).integers(1, BOS, (documents, LENGTH)).astype("u2")


def write(folder, layout="v2, a document a chunk, as published", **change):
    for split, tokens in {"train": ids(TRAIN), "heldout": ids(HELDOUT, 1), **change}.items():
        array = zarr.create_array(
            str(folder / f"{split}.zarr"), shape=tokens.shape, dtype=tokens.dtype, **LAYOUTS[layout]
        )
        array[:] = tokens
    return {"corpus": "longcrawl64", "path": str(folder)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_longcrawl64_order_is_column_by_column_unshuffled_and_shifted_by_one(tmp_path, layout):
    corpus = prepare(write(tmp_path, layout))
    tokens = ids(TRAIN)
    sequences = corpus.sequences("train", 16, seed=3)
    assert len(sequences) == TRAIN * 4
    # written out: every document's first 16 tokens, then every document's next 16; then again
    expected = [tokens[d, 16 * s : 16 * (s + 1)] for s in [0, 1, 2, 3, 0] for d in range(TRAIN)]
    for step in (0, 1, 5, 6, 0):  # batches of 9 straddle columns, and 6 the end of the epoch
        inputs, labels = sequences.batch(step, 9)
        assert labels.tolist() == [row.tolist() for row in expected[9 * step : 9 * step + 9]]
        assert (inputs[:, 0] == BOS).all() and torch.equal(inputs[:, 1:], labels[:, :-1])
        assert inputs.dtype == labels.dtype == torch.int64
    again = prepare({"corpus": "longcrawl64", "path": str(tmp_path)}).sequences("train", 16, seed=4)
    assert torch.equal(again.batch(2, 9)[1], sequences.batch(2, 9)[1])


def test_incomplete_last_slice_is_dropped(tmp_path):
    corpus = prepare(write(tmp_path))
    sequences = corpus.sequences("train", 24)
    split = corpus.describe(24)["splits"]["train"]
    assert (split["sequences"], split["share_used"]) == (len(sequences), 48 / 64) == (2 * TRAIN, 48 / 64)
    _, labels = sequences.batch(0, 2 * TRAIN)
    assert labels[TRAIN].tolist() == ids(TRAIN)[0, 24:48].tolist()


@pytest.mark.parametrize("arguments", [{}, {"max_tokens": 90}, {"same_text_as": 32}])
def test_heldout_matches_an_in_memory_corpus(tmp_path, arguments):
    corpus = prepare(write(tmp_path, "v2, chunks across"))
    vector = TokenSequences(ids(HELDOUT, 1).reshape(-1), corpus.offsets("heldout"), 16, "heldout", bos_id=BOS)
    ours = list(corpus.sequences("heldout", 16).iter_batches(3, **arguments))
    theirs = list(vector.iter_batches(3, **arguments))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("train", "damage", "message"),
    [
        # zarr reads a missing file as zeros, so an incomplete download would train on exclamation marks.
        (ids(TRAIN), Path.unlink, r"train\.zarr: chunk 3\.0 is missing"),
        (ids(TRAIN), lambda chunk: chunk.write_bytes(chunk.read_bytes()[:20]), "cannot be decoded"),
        (ids(TRAIN), lambda chunk: shutil.rmtree(chunk.parent), r"train\.zarr cannot be read .*gsutil"),
        (
            ids(TRAIN) + np.uint16(15000),
            Path.exists,
            "token id outside of GPT-2's vocabulary near document 0",
        ),
        (ids(TRAIN).astype("f4"), Path.exists, "of float32, not token ids"),
    ],
)
def test_damage_is_detected_and_reported(tmp_path, train, damage, message):
    settings = write(tmp_path, train=train)
    damage(tmp_path / "train.zarr" / "3.0")
    with pytest.raises(DataError, match=message):
        prepare(settings).sequences("train", 16).batch(0, 9)
