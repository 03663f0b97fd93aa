"""Every notebook runs from top to bottom, in a folder as fresh as a clone, and is stored without outputs."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from acp_repro import train as train_command
from acp_repro.model import FoXConfig, FoXForCausalLM, save_pretrained
from tests.suites import YAML, write_suite

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
HEADS = "04_exploring_heads"


def test_there_are_four():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_run_leaves_is_stored(name):
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(c["outputs"] == [] and c["execution_count"] is None for c in code)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert not any(cell["metadata"] for cell in notebook["cells"])
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(i.startswith(name[:2]) for i in ids)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The files that a notebook finds in a clone: no runs, no figures, no weights."""
    for name in ("notebooks", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ACP_REPRO_CACHE", os.environ.get("ACP_REPRO_CACHE", str(ROOT / "cache")))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


def execute(project: Path, name: str, start: str = "notebooks"):
    """The cells' outputs, one list a code cell; the kernel starts in ``start``."""
    reason = "nbclient and ipykernel run notebooks: pip install -e '.[notebooks]'"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    notebook = nbformat.read(project / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(project / start)}}
    ).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def kinds(outputs) -> list[str]:
    """The MIME types that the outputs of one or more cells show."""
    return [kind for output in outputs for kind in output.get("data", {})]


def text(outputs) -> str:
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize(
    ("name", "start", "figures"),
    [
        ("01_forget_gates", "notebooks", 2),
        ("02_pruning_threshold", ".", 4),
        ("03_boundary_search", "notebooks", 3),
    ],
)
def test_it_runs(project, name, start, figures):
    outputs = [output for cell in execute(project, name, start) for output in cell]
    assert kinds(outputs).count("image/png") == figures
    assert {path.name for path in project.iterdir()} <= {
        "notebooks",
        "experiments",
        "pyproject.toml",
        "ipython",
    }


NO_WIDGETS = "raise ImportError('not installed')"
# Stands in for ipywidgets. nbclient now and then waits out its whole timeout on the real thing: what it
# sends back to an output widget can hide the kernel's reply.
WIDGETS = """
class Dropdown:
    def __init__(self, options, value):
        assert value in options
        self.value = value

def interact(function, **choices):
    print("chosen with widgets")
    function(**{name: choice.value for name, choice in choices.items()})
"""


def use_widgets(project: Path, monkeypatch, source: str) -> None:
    (project / "stub").mkdir()
    (project / "stub" / "ipywidgets.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(project / "stub"), str(ROOT)]))


def test_heads_of_a_model_trained_on_the_spot_and_no_widgets(project, monkeypatch):
    use_widgets(project, monkeypatch, NO_WIDGETS)
    cells = execute(project, HEADS)
    (chosen,) = (cell for cell in cells if "pip install ipywidgets" in text(cell))
    assert kinds(chosen).count("image/png") == 2  # the most local and the most global head
    assert any("acp_repro-" in text(cell) for cell in cells)  # a temporary folder
    assert not (project / "runs").exists()


def test_heads_of_a_run_of_the_suite_and_widgets(project, monkeypatch):
    use_widgets(project, monkeypatch, WIDGETS)
    yaml = YAML.replace("[128]", "[256]").replace("micro_batch_tokens: 128", "micro_batch_tokens: 256")
    monkeypatch.chdir(project)
    monkeypatch.setenv("ACP_REPRO_CACHE", str(project / "cache"))
    write_suite(project, yaml, "cpu")  # so that the run folder is runs/cpu/...
    assert train_command.main(["--suite", "cpu", "--run", "pro-tiny-256-acp"]) == 0
    cells = execute(project, HEADS)
    assert any("runs/cpu/pro-tiny-256-acp" in text(cell) for cell in cells)
    (chosen,) = (cell for cell in cells if "chosen with widgets" in text(cell))
    assert kinds(chosen).count("image/png") == 1


def test_heads_of_a_pretrained_model_come_first(project, monkeypatch):
    use_widgets(project, monkeypatch, NO_WIDGETS)
    torch.manual_seed(0)
    config = FoXConfig.llama(
        vocab_size=257, hidden_size=32, num_hidden_layers=1, num_heads=2, log_pruning_tolerance=None
    )
    save_pretrained(FoXForCausalLM(config), project / "pretrained" / "some" / "model")
    (project / "runs" / "cpu").mkdir(parents=True)
    cells = execute(project, HEADS, ".")
    assert any("pretrained/some/model" in text(cell) for cell in cells)
    assert not any("tokens cannot be shown" in text(cell) for cell in cells)  # bytes are bytes
