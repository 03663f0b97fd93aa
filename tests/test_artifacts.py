"""An artifact is intact and up to date, or one line names the problem."""

import json
import logging
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from acp_repro.common import artifacts
from acp_repro.common.artifacts import ArtifactError, is_current, open_or_build, open_or_explain

INPUTS = {"text": "fox", "sizes": (1, 2)}


def build(folder):
    (folder / "a").write_bytes(b"some tokens")
    (folder / "b").touch()
    return {"n": 8}


@pytest.fixture
def folder(tmp_path):
    open_or_build(folder := tmp_path / "cache" / "entry", INPUTS, build)
    return folder


def edited(change):
    def edit(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return edit


def replaced(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


def flip(folder):
    """A change that alters neither size nor date."""
    stat = (folder / "a").stat()
    (folder / "a").write_bytes(b"same tokens")
    os.utime(folder / "a", ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE = {
    "other content": (flip, "does not match the SHA-256"),
    "a cut file": (lambda folder: (folder / "a").write_bytes(b"some"), "does not match the SHA-256"),
    "a missing file": (lambda folder: (folder / "b").unlink(), "does not match the SHA-256"),
    "another file": (lambda folder: (folder / "c").touch(), "does not match the SHA-256"),
    "a folder for a file": (lambda folder: (folder / "c").mkdir(), "does not match the SHA-256"),
    "no folder": (shutil.rmtree, "manifest.json is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "a cut manifest": (replaced('{"inputs": '), "not a JSON object"),
    "bytes": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\xfd"), "not a JSON object"),
    "a list": (replaced("[1]"), "not a JSON object"),
    "a deep list": (replaced("[" * 100_000), "not a JSON object"),
    "an empty object": (replaced("{}"), "empty or not a JSON object"),
    "a deep object": (replaced('{"a":' * 900 + "1" + "}" * 900), "edited"),
    "no files": (edited(lambda manifest: manifest.update(sha256={})), "edited"),
    "inputs of another type": (edited(lambda manifest: manifest.update(inputs=[1])), "edited"),
    "other facts": (edited(lambda manifest: manifest.pop("n")), "edited"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_in_one_line_and_repaired(folder, kind, caplog):
    assert is_current(folder, None) and is_current(folder, INPUTS)
    damage, wrong = DAMAGE[kind]
    damage(folder)
    assert not is_current(folder, None) and not is_current(folder, INPUTS)
    with pytest.raises(ArtifactError, match=rf"^{folder}.*{wrong}.*; delete me$") as error:
        open_or_explain(folder, INPUTS, remedy="delete me")
    assert "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert open_or_build(folder, INPUTS, build)["n"] == 8
    assert ("building it again" in caplog.text) == (kind != "no folder")
    assert open_or_build(folder, INPUTS, pytest.fail)["inputs"] == {"text": "fox", "sizes": [1, 2]}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["entry", "entry.lock"]


def test_changed_inputs_are_reported(folder):
    assert not is_current(folder, {})
    with pytest.raises(ArtifactError, match=rf"^{folder} was made from other inputs \(text, new\); "):
        open_or_explain(folder, INPUTS | {"text": "cat", "new": 1})


def test_manifest_is_next_to_the_file_or_inside_it(tmp_path):
    weights, done = tmp_path / "weights", tmp_path / "done.json"
    weights.write_bytes(b"w")
    artifacts.write_manifest(done, weights, INPUTS, {"tokens": 3})
    assert open_or_explain(weights, INPUTS, manifest=done)["tokens"] == 3
    assert not is_current(weights, {}, done)
    # As published: without recorded inputs, so any inputs are valid.
    done.write_text(json.dumps({"sha256": artifacts.sha256_of(weights)}))
    assert is_current(weights, INPUTS, done)
    weights.write_bytes(b"v")
    assert not is_current(weights, None, done)
    artifacts.write_manifest(done, done, INPUTS, {"tokens": 3})
    assert is_current(done, INPUTS, done) and not is_current(done, {}, done)
    done.write_text(done.read_text().replace("3", "4"))
    assert not is_current(done, None, done)


def test_files_are_synced_before_the_artifact_is_renamed(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), folder.exists()))
        fsync(descriptor)

    folder = tmp_path / "entry"
    monkeypatch.setattr(os, "fsync", record)
    open_or_build(folder, INPUTS, build)
    before = {name for name, named in synced if not named}
    assert {"a", "b", ".entry"} < before and any("manifest.json" in name for name in before)
    assert synced[-1] == (tmp_path.name, True)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_killed_build_leaves_no_files(tmp_path, error):
    def dies(folder):
        assert not any(folder.iterdir())
        build(folder)
        raise error

    (tmp_path / ".entry" / "left").mkdir(parents=True)  # left by a build that was killed
    with pytest.raises(error):
        open_or_build(tmp_path / "entry", INPUTS, dies)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_concurrent_builds_produce_one_artifact(tmp_path):
    built = []

    def slow(folder):
        built.append(1)
        time.sleep(0.05)
        return build(folder)

    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda _: open_or_build(tmp_path / "e", INPUTS, slow), range(4)))
    assert len(built) == 1 and got == [got[0]] * 4
