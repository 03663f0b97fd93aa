"""Every notebook runs from top to bottom as its readers run it, and is stored with what its code shows."""

import difflib
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from acp_repro import inspect as inspect_command
from acp_repro.model import FoXConfig, FoXForCausalLM, save_pretrained

REASON = "nbclient and ipykernel run notebooks: pip install -e '.[notebooks]'"
nbformat = pytest.importorskip("nbformat", reason=REASON)
for needed in ("nbclient", "ipykernel"):
    pytest.importorskip(needed, reason=REASON)

from notebooks import refresh  # noqa: E402

ROOT = Path(__file__).parent.parent
NAMES = [path.stem for path in refresh.NOTEBOOKS]
HEADS, MODEL = "04_exploring_heads", "pretrained/pro-3m-4k-acp"
LAP, RETENTION = "06_learnable_attention_pruning", "05_adaptive_retention"
PICTURES = {"01_forget_gates": 2, "02_pruning_threshold": 4, "03_boundary_search": 3, HEADS: 2}
PICTURES |= {RETENTION: 5, LAP: 5}


def by_cell(notebook) -> dict[str, list]:
    """The outputs of each code cell, by the cell's id."""
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def kinds(outputs) -> list[str]:
    """The MIME types that the outputs of one or more cells show."""
    return [kind for output in outputs for kind in sorted(output.get("data", {}))]


def text(outputs) -> str:
    return "".join(output.get("text", "") for output in outputs)


# ---- what is stored ------------------------------------------------------------------------


def read(name: str):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_what_the_code_showed(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert refresh.is_stored(path), f"python notebooks/refresh.py {path}"
    notebook = read(name)
    nbformat.validate(notebook)
    shown = [output for outputs in by_cell(notebook).values() for output in outputs]
    assert kinds(shown).count("image/png") == PICTURES[name]
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and all(i.startswith(name[:2]) for i in ids)
    assert path.read_text(encoding="utf-8") == nbformat.writes(refresh.tidy(notebook)) + "\n"


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


@pytest.mark.parametrize(
    "output",
    [
        stream(f"trained {ROOT / 'runs'}\n"),
        stream("UserWarning\n", "stderr"),
        nbformat.v4.new_output("error", ename="E", evalue="no", traceback=[]),
    ],
)
def test_paths_warnings_and_errors_are_refused(output):
    with pytest.raises(refresh.NotStorable):
        cell = nbformat.v4.new_code_cell("...", outputs=[output])
        refresh.tidy(nbformat.v4.new_notebook(cells=[cell]))


# ---- what runs -----------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """What a notebook finds in a clone without runs, figures and weights."""
    for name in ("notebooks", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("acp_repro", "analysis", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("ACP_REPRO_CACHE", os.environ.get("ACP_REPRO_CACHE", str(ROOT / "cache")))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


def execute(project: Path, name: str, start: str = "notebooks") -> dict[str, list]:
    """The outputs of each cell; the kernel starts in ``start``."""
    return by_cell(refresh.execute(project / "notebooks" / f"{name}.ipynb", project / start))


def small_model(project: Path) -> None:
    """Weights that nobody trained, whose tokens are bytes, in place of the model that comes along."""
    torch.manual_seed(0)
    config = FoXConfig.llama(
        vocab_size=257, hidden_size=32, num_hidden_layers=1, num_heads=2, log_pruning_tolerance=None
    )
    save_pretrained(FoXForCausalLM(config), project / MODEL)


def test_heads_are_those_of_inspect(project, capsys):
    """The model's own length, and as much text: at a quarter of the length other heads are local."""
    small_model(project)
    path = project / "notebooks" / f"{HEADS}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    last = next(i for i, cell in enumerate(notebook.cells) if cell.id == "04-06")
    notebook.cells = notebook.cells[: last + 1]
    nbformat.write(notebook, path)
    shown = text(execute(project, HEADS)["04-06"])
    assert inspect_command.main([str(project / MODEL)]) == 0
    said = capsys.readouterr().out
    sequences, length, pruned, allowed = re.match(
        r"(\d+) sequences of ([\d,]+) tokens; ([\d.]+%) .* allows ([\d.]+%)", shown
    ).groups()
    tokens = int(sequences) * int(length.replace(",", ""))
    assert f"{tokens:,} tokens in sequences of {length}," in said
    assert f"pruned  {pruned} of all blocks (the grid allows {allowed})" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_shows_what_is_stored(project, name):
    needs = {LAP: ("transformers", "shap"), RETENTION: ("transformers",)}.get(name, ())
    for library in needs:
        pytest.importorskip(library, reason="pip install -e '.[lap,retention]'")
    if name in (HEADS, LAP, RETENTION):
        (project / "pretrained").symlink_to(ROOT / "pretrained")
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
