"""Tokenisers: exact round trips, no BOS from text, and a deterministic BPE."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.model import BPETokenizer, ByteTokenizer
from acp_repro.model import tokenizer as model_tokenizer
from acp_repro.pipeline.data import tokenizer as module
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Document
from acp_repro.pipeline.data.tokenizer import train_bpe

TEXT = "the cat and the hat sat on the mat\n  and\n\n\tthe rat <|endoftext|> naïve 日本\n" * 200


def documents(*texts):
    return [Document(str(i), text.encode(), b"") for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def bpe():
    return BPETokenizer(train_bpe(documents(TEXT, TEXT.upper()), 300))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode() and ids.dtype == np.uint8
    assert tokenizer.decode([tokenizer.bos_id, *ids, 256]) == text


def test_bpe_round_trip_and_bos(bpe):
    @settings(max_examples=60, deadline=None)
    @given(st.text())
    def check(text):
        ids = bpe.encode(text)
        assert bpe.decode([bpe.bos_id, *ids]) == text
        assert not len(ids) or ids.max() < bpe.bos_id

    check()
    assert (bpe.vocab_size, bpe.bos_id, bpe.name) == (300, 299, "bpe300")
    assert bpe.decode(bpe.encode(TEXT)) == TEXT
    assert len(bpe.encode(TEXT)) < len(TEXT) / 1.8  # the BPE compresses
    assert bpe.encode("").shape == (0,)


def test_batched_encoding_equals_single_encoding(bpe):
    texts = ["a few words", "", " and  more\n", "ünïcode 🦊"]
    for tokenizer in (bpe, ByteTokenizer()):
        for ids, text in zip(tokenizer.encode_many(texts), texts, strict=True):
            assert (ids == tokenizer.encode(text)).all() and ids.dtype == tokenizer.encode(text).dtype


def test_bpe_training_sample_is_bounded_and_independent_of_order(monkeypatch):
    monkeypatch.setattr(module, "BPE_TRAINING_BYTES", 3000)
    texts = [f"{i} {chr(97 + i) * 3} " * 100 for i in range(20)]
    first = train_bpe(documents(*texts), 262)
    assert train_bpe(documents(*reversed(texts)), 262) == first


def test_long_texts_are_encoded_in_pieces(bpe, monkeypatch):
    whole = bpe.encode(TEXT)
    monkeypatch.setattr(model_tokenizer, "_PIECE_BYTES", 100)
    assert len(list(model_tokenizer.split_lines(TEXT.encode()))) > 50
    pieces = bpe.encode(TEXT)
    assert bpe.decode(pieces) == TEXT
    assert abs(len(pieces) - len(whole)) < len(whole) / 20
    assert list(model_tokenizer.split_lines(b"no line end" * 99)) == ["no line end" * 99]


def test_too_little_text_for_the_vocabulary_is_rejected():
    with pytest.raises(DataError, match=r"yield only 25\d of 4096 ids.*set \{bpe: 25\d\}"):
        train_bpe(documents("ab ab"), 4096)


# ---- GPT-2's, and files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", r"cannot be read .*relative paths start at"),
        (b'{"version": ', "not a file of the library .*copy it again"),
    ],
)
def test_invalid_tokenizer_files_are_rejected(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"tokenizer: file: .*tokenizer\.json.*{message}"):
        module.read_tokenizer(str(path))
