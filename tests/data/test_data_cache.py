"""Cache entries are whole and checked, or not there."""

import logging
import os
import threading
import time

import numpy as np
import pytest

from acp_repro.pipeline.data import cache as module
from acp_repro.pipeline.data.cache import open_or_build


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


def test_every_file_is_on_the_disk_before_the_entry_gets_its_name(tmp_path, monkeypatch):
    synced = []

    def sync(path):
        assert not (tmp_path / "entry").exists() or path == tmp_path
        synced.append(path.name)

    monkeypatch.setattr(module, "sync", sync)
    open_or_build(tmp_path / "entry", "key", build)
    assert synced == ["a", "b", tmp_path.name]


def flip(folder):
    """A change that shows neither in the size nor in the date."""
    path = folder / "a"
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda folder: (folder / "a").unlink(),
        lambda folder: (folder / "meta.json").write_text('{"key": '),
        lambda folder: (folder / "meta.json").write_text('{"key": "other", "facts": {}, "files": {}}'),
        lambda folder: (folder / "meta.json").write_bytes(
            (folder / "meta.json").read_bytes().replace(b'"key": "key"', b'"key": "other"')
        ),
    ],
)
def test_damage_is_seen_said_and_repaired(folder, damage, caplog):
    damage(folder)
    with caplog.at_level(logging.WARNING):
        entry = open_or_build(folder, "key", build)
    assert "is corrupt; building it again" in caplog.text
    assert entry.array("a", "<u2").tolist() == list(range(8))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_killed_build_leaves_nothing(tmp_path, error):
    def dies(writer):
        writer.append("a", b"half")
        raise error

    left = tmp_path / "entry.partial"  # of a build that was killed without a chance
    left.mkdir()
    with pytest.raises(error):
        open_or_build(tmp_path / "entry", "key", dies)
    assert [p.name for p in tmp_path.iterdir()] == ["entry.lock"]


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
