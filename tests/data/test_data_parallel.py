"""Several threads give what one gives, and none is left behind when something fails."""

import threading

import numpy as np
import pytest

from acp_repro.model import BPETokenizer
from acp_repro.pipeline.data import parallel as module
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.parallel import tokenise
from acp_repro.pipeline.data.sources import Document
from acp_repro.pipeline.data.tokenizer import train_bpe

TEXT = "the cat and the hat sat on the mat\n  and\n\n\tthe rat naïve 日本\n" * 100


def labelled(count, size=997):
    for i in range(count):
        data = TEXT[: size * i % len(TEXT)].encode()
        yield ("heldout" if i % 7 == 0 else "train"), Document(str(i), data, b"")


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    return BPETokenizer(train_bpe([Document("", TEXT.encode(), b"")], 270))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(module, "_GROUP_BYTES", 3000)


def test_any_number_of_workers_gives_the_same(bpe):
    alone = list(tokenise(labelled(60), bpe, 1))
    together = list(tokenise(labelled(60), bpe, 2))
    assert len(alone) == len(together) == 60
    for (split, document, ids), other, given in zip(alone, together, labelled(60), strict=True):
        assert (split, document) == other[:2] == given
        assert np.array_equal(ids, other[2]) and ids.dtype == other[2].dtype
        assert bpe.decode(ids) == document.data.decode(errors="replace")


def test_no_more_is_read_than_the_workers_need_soon(bpe):
    read = []

    def seen():
        for one in labelled(5000):
            read.append(one)
            yield one

    running = tokenise(seen(), bpe, 2)
    next(running)
    assert len(read) < 200
    running.close()


def test_a_reader_error_or_a_caller_that_stops_ends_the_workers(bpe):
    def broken():
        yield from labelled(50)
        raise DataError("line 51")

    before = set(threading.enumerate())  # other tests' libraries keep threads of their own
    with pytest.raises(DataError, match="line 51"):
        list(tokenise(broken(), bpe, 2))
    stopping = tokenise(labelled(50), bpe, 2)
    next(stopping)
    stopping.close()
    assert set(threading.enumerate()) <= before
