"""Cache entries are whole and checked, or not there."""

import logging
import os
import threading
import time

import numpy as np
import pytest

from acp_repro.data.cache import CorruptEntry, Entry, open_or_build


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
    entry.verify()
    assert sorted(p.name for p in folder.parent.iterdir()) == ["entry", "entry.lock"]


def flip(folder):
    data = bytearray((folder / "a").read_bytes())
    data[3] ^= 1
    (folder / "a").write_bytes(data)


DAMAGE = {
    "a has 15 bytes, not 16": lambda f: (f / "a").write_bytes((f / "a").read_bytes()[:-1]),
    "the content of a has changed": flip,
    "a cannot be read": lambda f: (f / "a").unlink(),
    "meta.json is missing or damaged": lambda f: (f / "meta.json").write_text('{"key": '),
    "meta.json is missing": lambda f: (f / "meta.json").unlink(),
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


def test_a_change_that_hides_its_time_is_seen_by_verify(folder):
    stat = (folder / "a").stat()
    flip(folder)
    os.utime(folder / "a", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    entry = Entry(folder, "key")  # cheap: size and time are as recorded
    with pytest.raises(CorruptEntry, match="the content of a has changed"):
        entry.verify()


def test_a_new_time_alone_is_hashed_once(folder, monkeypatch):
    os.utime(folder / "a", ns=(1, 1))
    Entry(folder, "key")

    def hashes(*_):
        raise AssertionError("hashed again")

    monkeypatch.setattr("hashlib.file_digest", hashes)
    Entry(folder, "key")


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
