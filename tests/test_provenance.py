"""Where a record comes from: the commit, marked if the files differ from it."""

import subprocess

import pytest

from acp_repro.pipeline import provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, as the folder around the code; calls git there."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "ACP_REPRO_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "acp_repro" / "pipeline" / "provenance.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(file))

    def git(*words: str) -> str:
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("add", "acp_repro", "pyproject.toml")
    git("commit", "-m", "one")
    return tmp_path, git


def test_a_commit_is_dirty_if_tracked_files_differ(checkout, monkeypatch):
    folder, git = checkout
    commit, find = git("rev-parse", "--short=12", "HEAD"), provenance.commit.__wrapped__
    (folder / "results.csv").write_text("new, and not tracked")
    assert find() == commit and len(commit) == 12
    (folder / "pyproject.toml").write_text("changed")
    assert find() == f"{commit}-dirty"
    monkeypatch.setenv("ACP_REPRO_COMMIT", "named")
    assert find() == "named"


def test_code_outside_a_checkout_has_no_commit(checkout):
    folder, _ = checkout
    (folder / "pyproject.toml").unlink()
    assert provenance.commit.__wrapped__() is None
