"""Cache entries are whole and checked, or not there."""

import logging
import os
import threading
import time

import numpy as np
import pytest

from acp_repro.pipeline.data.cache import CorruptEntry, Entry, open_or_build


def build(writer):
    writer.append("a", np.arange(5, dtype="<u2"))
    writer.append("a", np.arange(5, 8, dtype="<u2"))
    writer.append("b", b"")
    return {"n": 8}


def never(writer):
    raise AssertionError("built again")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "cache" / "entry"
    open_or_build(folder, "key", build)
    return folder


def test_build_then_open(folder):
    entry = open_or_build(folder, "key", never)
    assert entry.facts == {"n": 8}
    array = entry.array("a", "<u2")
    assert isinstance(array, np.memmap) and array.tolist() == list(range(8))
    assert entry.array("b", "<u2").shape == (0,)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert sorted(p.name for p in folder.parent.iterdir()) == ["entry", "entry.lock"]


def flip(folder):
    """A change that shows neither in the size nor in the date."""
    path = folder / "a"
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE = {
    "the content of a has changed": flip,
    "a file is missing": lambda f: (f / "a").unlink(),
    "a file is missing or damaged": lambda f: (f / "meta.json").write_text('{"key": '),
    "it was made for the key other": lambda f: (f / "meta.json").write_text('{"key": "other"}'),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_seen_said_and_repaired(folder, message, caplog):
    DAMAGE[message](folder)
    with pytest.raises(CorruptEntry, match=message):
        Entry(folder, "key")
    with caplog.at_level(logging.WARNING):
        entry = open_or_build(folder, "key", build)
    assert f"corrupt: {message}" in caplog.text and "building it again" in caplog.text
    assert len(caplog.records) == 1
    assert entry.array("a", "<u2").tolist() == list(range(8))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_killed_build_leaves_nothing(tmp_path, error):
    def dies(writer):
        writer.append("a", b"half")
        raise error

    with pytest.raises(error):
        open_or_build(tmp_path / "entry", "key", dies)
    assert [p.name for p in tmp_path.iterdir()] == ["entry.lock"]


def test_a_build_killed_without_a_chance_is_swept_up(tmp_path):
    left = tmp_path / "entry.partial"
    left.mkdir()
    (left / "a").write_bytes(b"half")
    entry = open_or_build(tmp_path / "entry", "key", build)
    assert not left.exists() and entry.array("a", "<u2").size == 8


def test_a_failed_repair_keeps_the_error(folder):
    flip(folder)

    def dies(writer):
        raise RuntimeError("no text")

    with pytest.raises(RuntimeError, match="no text"):
        open_or_build(folder, "key", dies)
    with pytest.raises(CorruptEntry):
        Entry(folder, "key")


def test_one_of_many_builds(tmp_path):
    pytest.importorskip("fcntl", reason="locks of files: Linux or macOS")
    built, got = [], []

    def slow(writer):
        built.append(1)
        time.sleep(0.05)
        return build(writer)

    threads = [
        threading.Thread(target=lambda: got.append(open_or_build(tmp_path / "e", "key", slow)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(got) == 4
