"""Tokenisers: exact round trips, BOS out of reach, the same BPE from the same text."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.data import tokenizer as module
from acp_repro.data.files import DataError
from acp_repro.data.sources import Document
from acp_repro.data.tokenizer import BPETokenizer, ByteTokenizer, train_bpe

TEXT = "the cat and the hat sat on the mat\n  and\n\n\tthe rat <|endoftext|> naïve 日本\n" * 200


def documents(*texts):
    return [Document(str(i), text.encode(), b"") for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return BPETokenizer(train_bpe(documents(TEXT, TEXT.upper()), 300))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode() and ids.dtype == np.uint8
    assert tokenizer.decode([256, *ids, 256]) == text


def test_bytes_vocabulary():
    assert (ByteTokenizer.vocab_size, ByteTokenizer.bos_id) == (257, 256)
    assert ByteTokenizer().decode([0xE6, 0x97]) == "\N{REPLACEMENT CHARACTER}"  # half of 日


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
    assert len(bpe.encode(TEXT)) < len(TEXT) / 1.8  # it does learn
    assert bpe.encode("").shape == (0,)


def test_bpe_does_not_depend_on_document_order(bpe):
    again = BPETokenizer(train_bpe(documents(TEXT.upper(), TEXT), 300))
    assert again._bpe.to_str() == bpe._bpe.to_str()


def test_bpe_training_sample_is_bounded_and_independent_of_order(monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(module, "BPE_TRAINING_BYTES", 3000)
    texts = [f"{i} {chr(97 + i) * 3} " * 100 for i in range(20)]
    first = train_bpe(documents(*texts), 262)
    assert train_bpe(documents(*reversed(texts)), 262) == first


def test_long_texts_go_in_pieces(bpe, monkeypatch):
    whole = bpe.encode(TEXT)
    monkeypatch.setattr(module, "_PIECE_BYTES", 100)
    assert len(list(module._pieces(TEXT.encode()))) > 50
    pieces = bpe.encode(TEXT)
    assert bpe.decode(pieces) == TEXT
    assert abs(len(pieces) - len(whole)) < len(whole) / 20
    assert list(module._pieces(b"no line end" * 99)) == [b"no line end" * 99]


@pytest.mark.parametrize("cores", [1, 5])
def test_threads_keep_the_order(bpe, monkeypatch, cores):
    monkeypatch.setattr(module, "_usable_cores", lambda: cores)
    texts = [TEXT[: 997 * i % 5000] for i in range(40)]
    got = list(bpe.encode_all(iter(documents(*texts))))
    assert [bpe.decode(ids) for ids in got] == texts


def test_threads_pass_a_reader_error_on(bpe):
    def broken():
        yield from documents(TEXT, TEXT)
        raise DataError("line 3")

    with pytest.raises(DataError, match="line 3"):
        list(bpe.encode_all(broken()))


def test_too_little_text_for_the_vocabulary():
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"give 25\d ids of the 4096 asked.*write \{bpe: 25\d\}"):
        train_bpe(documents("ab ab"), 4096)


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'acp_repro\[bpe\]', or set tokenizer: bytes"):
        train_bpe(documents(TEXT), 300)
