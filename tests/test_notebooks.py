"""Every notebook runs from top to bottom as its readers run it, and is stored with what its code shows."""

import difflib
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


def by_cell(notebook) -> dict[str, list]:
    """The outputs of each code cell, by the cell's id."""
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def kinds(outputs) -> list[str]:
    """The MIME types that the outputs of one or more cells show."""
    return [kind for output in outputs for kind in sorted(output.get("data", {}))]


def text(outputs) -> str:
    return "".join(output.get("text", "") for output in outputs)


def read(name: str):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_what_the_code_showed(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert refresh.is_stored(path), f"python notebooks/refresh.py {path}"
    notebook = read(name)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert 0 < len(set(ids)) == len(ids) and all(i.startswith(name[:2]) for i in ids)
    assert path.read_text(encoding="utf-8") == nbformat.writes(refresh.tidy(notebook)) + "\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """What a notebook finds in a clone without runs, figures and weights."""
    for name in ("notebooks", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("acp_repro", "analysis", "pretrained", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("ACP_REPRO_CACHE", os.environ.get("ACP_REPRO_CACHE", str(ROOT / "cache")))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_shows_what_is_stored(project, name):
    start = "." if name.startswith("02") else "notebooks"
    before = set(project.iterdir())
    new = by_cell(refresh.tidy(refresh.execute(project / "notebooks" / f"{name}.ipynb", project / start)))
    old = by_cell(read(name))
    assert {cell: kinds(outputs) for cell, outputs in new.items()} == {
        cell: kinds(outputs) for cell, outputs in old.items()
    }
    # Rounding, and with it what the model writes, may differ on another machine; nothing else does.
    first, second = (
        " ".join(
            text([output]) + output.get("data", {}).get("text/plain", "")
            for outputs in cells.values()
            for output in outputs
        ).split()
        for cells in (old, new)
    )
    assert difflib.SequenceMatcher(None, first, second, autojunk=False).ratio() > 0.7
    assert set(project.iterdir()) - before <= {project / "ipython"}
