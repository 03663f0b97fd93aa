"""Worker processes give what one process gives, and leave nothing behind when they fail."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from acp_repro.data import parallel as module
from acp_repro.data.files import DataError
from acp_repro.data.parallel import tokenise
from acp_repro.data.sources import Document
from acp_repro.data.tokenizer import BPETokenizer, ByteTokenizer, train_bpe

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


@pytest.fixture
def started(monkeypatch):
    """Every process that is started."""
    all_of_them = []

    class Seen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            all_of_them.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Seen)
    return all_of_them


def test_any_number_of_workers_gives_the_same(bpe, started):
    alone = list(tokenise(labelled(60), bpe, 1))
    assert not started
    together = list(tokenise(labelled(60), bpe, 2))
    assert len(started) == 2 and all(process.returncode == 0 for process in started)
    assert len(alone) == len(together) == 60
    for (split, document, ids), other, given in zip(alone, together, labelled(60), strict=True):
        assert (split, document) == other[:2] == given
        assert np.array_equal(ids, other[2]) and ids.dtype == other[2].dtype
        assert bpe.decode(ids) == document.data.decode(errors="replace")


def test_little_text_and_bytes_start_no_process(bpe, started):
    assert len(list(tokenise(labelled(5), bpe, 4))) == 5
    assert len(list(tokenise(labelled(60), ByteTokenizer(), 4))) == 60
    assert not started


def test_a_reader_error_or_a_caller_that_stops_ends_the_workers(bpe, started):
    def broken():
        yield from labelled(50)
        raise DataError("line 51")

    before = set(threading.enumerate())  # other tests' libraries keep threads of their own
    with pytest.raises(DataError, match="line 51"):
        list(tokenise(broken(), bpe, 2))
    stopping = tokenise(labelled(50), bpe, 2)
    next(stopping)
    stopping.close()
    assert len(started) == 4 and all(process.returncode == 0 for process in started)
    assert set(threading.enumerate()) <= before


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX: run on Linux or macOS")
def test_a_killed_worker_is_one_clear_line(bpe, started):
    running = tokenise(labelled(5000), bpe, 2)
    next(running)
    started[0].send_signal(signal.SIGKILL)
    with pytest.raises(DataError, match=r"ended with exit code -9 .*--workers 1"):
        list(running)
    assert all(process.returncode is not None for process in started)


def test_an_unguarded_script_can_use_workers(tmp_path):
    """Spawned copies of a script would run it again; these workers do not."""
    pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    script = tmp_path / "script.py"
    (tmp_path / "a.txt").write_text(TEXT * 40)
    (tmp_path / "b.txt").write_text(TEXT.upper() * 40)
    script.write_text(
        "from acp_repro.data import parallel, prepare\n"
        "parallel._GROUP_BYTES, parallel._FEW_GROUPS = 1000, 1\n"
        f"data = dict(corpus='text', path={str(tmp_path)!r}, heldout=0, tokenizer={{'bpe': 300}})\n"
        f"print(len(prepare(data, {str(tmp_path / 'cache')!r}, workers=2).tokens('train')))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdecimal()
