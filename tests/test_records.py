"""The contents and provenance of results: the commit, marked as dirty if files differ."""

import subprocess
import time

import pandas
import pytest

from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline import provenance
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import RESULTS
from acp_repro.pipeline.paper_registry import find_paper, paper_names
from acp_repro.pipeline.records import read_records
from tests.analysis import synthetic

RUN = "pro-tiny-128-acp"


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


def test_commit_is_dirty_if_tracked_files_differ(checkout, monkeypatch):
    folder, git = checkout
    commit, find = git("rev-parse", "--short=12", "HEAD"), provenance.commit.__wrapped__
    (folder / "results.csv").write_text("new, and not tracked")
    assert find() == commit and len(commit) == 12
    (folder / "pyproject.toml").write_text("changed")
    assert find() == f"{commit}-dirty"
    (folder / "pyproject.toml").unlink()  # then the code is not in a checkout
    assert find() is None
    monkeypatch.setenv("ACP_REPRO_COMMIT", "named")
    assert find() == "named"


def test_equal_values_are_written_as_identical_bytes(make_suite, monkeypatch):
    make_suite()
    path, found = PAPER.metric("loss_curve").path("mini", RUN), []
    assert path.suffix == ".gz"
    for now in (1e9, 1.5e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        synthetic.write(RUN, "loss_curve", {"position": 1, "loss_nats": 3.0})
        found.append(path.read_bytes())
    assert found[0] == found[1]


def test_results_of_some_runs_are_read_if_present(make_suite):
    mini = make_suite()
    with pytest.raises(RecordError, match="no records of loss in results/mini for pro-tiny-128-acp, pro-"):
        read_records(mini, "loss", partial=True)
    synthetic.write(RUN, "loss", {"loss_nats": 3.0})
    assert read_records(mini, "loss", partial=True)["run"].tolist() == [RUN]
    with pytest.raises(RecordError, match="no records of loss in results/mini for pro-tiny-128-exact; make"):
        read_records(mini, "loss")


@pytest.mark.parametrize(
    ("paper", "metric"),
    [(paper, metric) for paper in map(find_paper, paper_names()) for metric in paper.metrics],
    ids=lambda one: one.name,
)
def test_committed_results_have_the_declared_columns(paper, metric):
    for name, extra in filter(None, (paper.library, metric.library)):
        pytest.importorskip(name, reason=f"pip install -e '.[{extra}]'")
    for path in RESULTS.glob(f"*/*/{metric.path('', '').name}"):
        header = pandas.read_csv(path, nrows=0).columns
        assert tuple(header) == paper.columns(metric), path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_not_written(make_suite, value):
    make_suite()
    with pytest.raises(AssertionError, match="loss: not finite, so nothing is written"):
        synthetic.write(RUN, "loss", {"loss_nats": value})
    assert not PAPER.metric("loss").path("mini", RUN).exists()
