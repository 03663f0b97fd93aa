"""Every notebook runs from top to bottom in a fresh clone and writes nothing."""

import os
import shutil
from pathlib import Path

import pytest

REASON = "nbclient and ipykernel run notebooks: pip install -e '.[notebooks]'"
nbformat = pytest.importorskip("nbformat", reason=REASON)
for needed in ("nbclient", "ipykernel"):
    pytest.importorskip(needed, reason=REASON)

from notebooks import refresh  # noqa: E402

ROOT = Path(__file__).parent.parent
NAMES = [path.stem for path in refresh.NOTEBOOKS]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A clone without runs, figures and weights, for the notebooks."""
    for name in ("notebooks", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("acp_repro", "analysis", "pretrained", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("ACP_REPRO_CACHE", os.environ.get("ACP_REPRO_CACHE", str(ROOT / "cache")))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_from_top_to_bottom(project, name):
    start = "." if name.startswith("02") else "notebooks"
    before = set(project.iterdir())
    refresh.execute(project / "notebooks" / f"{name}.ipynb", project / start)
    assert set(project.iterdir()) - before <= {project / "ipython"}
