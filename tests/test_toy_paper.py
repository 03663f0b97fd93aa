"""A paper from outside of the package goes through the same commands: train, measure, draw, report.

It is a regression of five numbers with one quantity and one figure, known by an entry point alone.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAPER = """
from dataclasses import dataclass, field

from acp_repro.pipeline.paper import Paper, Suite
from acp_repro.pipeline.run import Run, Strict, TrainerConfig
from acp_repro.pipeline.suite import SuiteFile
from acp_repro.common.bounds import Axis, Count


@dataclass(frozen=True)
class Grid(Strict):
    width: Axis[Count]
    seed: Axis[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class Measure(Strict):
    batches: int = 2


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    grid: list[Grid]
    training: TrainerConfig = field(default_factory=lambda: TrainerConfig(dtype="float32"))
    measure: Measure = field(default_factory=Measure)


@dataclass(frozen=True, kw_only=True, eq=False)
class ToyRun(Run):
    width: int
    name = property(lambda self: f"width{self.width}-seed{self.seed}")
    setting = property(lambda self: (self.width,))

    def columns(self):
        return {"width": self.width, "seed": self.seed}


def make_run(file, suite, where, *, width, seed):
    return ToyRun(suite=suite, seed=seed, training=file.training, weights=file.weights, width=width)


PAPER = Paper(
    name="toy", title="Toys that <Learn>", url="https://example.org/toys", file=File, suite=Suite,
    make_run=make_run, run_columns=("width", "seed"),
    measures="toy", measured=("error",),
    task="toy.task:ToyTask", analysis="toy",
)
"""
TASK = """
import torch
from torch import nn

from acp_repro.pipeline.training.task import Task


class ToyTask(Task):
    steps, step_tokens = 60, 8

    def build(self):
        return nn.Sequential(nn.Linear(5, self.run.width), nn.Linear(self.run.width, 1))

    def batch(self, index):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(index))
        return x, x.sum(1, keepdim=True)

    def loss(self, model, x, y):
        return (model(x) - y).square().mean()

    def learning_rate(self, step):
        return 0.05
"""
ERROR = """
from acp_repro.pipeline.paper import Quantity


def measure(trained):
    batches = [trained.task.batch(1000 + i) for i in range(trained.measure_settings.batches)]
    return [{"squared_error": trained.task.loss(trained.model, *batch).item()} for batch in batches]


QUANTITY = Quantity("error", ("squared_error",), measure)
"""
FIGURE = '''
"""Error against width."""

from analysis.verdict import Verdict


def make(found):
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots()
    ax.plot(found.records["error"]["width"], found.records["error"]["squared_error"], "o")
    return figure, f"**Figure 1.** Errors of {len(found.runs)} toys."


def learns(error):
    return Verdict.of((error["squared_error"] < 0.1).all(), f"at <most> {error['squared_error'].max():.2g}")

'''
ITEMS = """
from acp_repro.pipeline.paper import Claim, Item
from toy import figure1

CLAIM = Claim("Toys learn", "Section 1: they do", "the error is under 0.1", ("error",), figure1.learns)
ITEMS = (Item("figure1", figure1.make, "Error against width", ("error",), claims=(CLAIM,)),)
"""
YAML = "description: a toy\npaper: toy\ngrid:\n  - {width: [3, 7]}\n"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A working folder with the project's Makefile, and beside it a package that nobody installed."""
    folder = tmp_path_factory.mktemp("toy")
    package = folder / "site" / "toy"
    package.mkdir(parents=True)
    modules = {"paper": PAPER, "task": TASK, "error": ERROR, "figure1": FIGURE, "items": ITEMS}
    for name, text in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(text)
    info = folder / "site" / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[acp_repro.papers]\ntoy = toy.paper:PAPER\n")
    (folder / "experiments").mkdir()
    (folder / "experiments" / "toy.yaml").write_text(YAML)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("acp_repro", "analysis"):
        (folder / name).symlink_to(ROOT / name)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / ".venv" / "installed").touch()
    return folder


def run(work, *command, expect=0, makeflags=""):
    path = os.pathsep.join([str(work / "site"), str(work)])
    environment = {**os.environ, "PYTHONPATH": path, "MAKEFLAGS": makeflags}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_whole_chain_of_a_paper_from_elsewhere(work):
    if shutil.which("make") is None:
        pytest.skip("install make, e.g. apt install make")
    assert "Error against width" in run(work, "make", "help", "SUITE=toy")
    output = run(work, "make", "report", "SUITE=toy", makeflags="-j4")
    # With many jobs too, one process trains all runs and one measures them.
    assert output.count("acp_repro.train") == output.count("acp_repro.measure") == 1
    for name in ("width3-seed0", "width7-seed0"):
        assert (work / "runs/toy" / name / "model/model.safetensors").is_file()
        header, *rows = (work / "results/toy" / name / "error.csv").read_text().splitlines()
        assert header.startswith("suite,run,width,seed,trained_tokens,squared_error,origin,device")
        assert len(rows) == 2 and rows[0].startswith(f"toy,{name},{name[5]},0,480,")
    assert "figure:" in output and (work / "figures/toy/figure1.png").is_file()
    page = (work / "figures/toy/report.html").read_text()
    assert "<h1>Toys that &lt;Learn&gt;, re-run: suite toy</h1>" in page and "at &lt;most&gt; " in page
    assert '<a href="https://example.org/toys">https://example.org/toys</a>' in page
    assert "<td>7</td>" in page and 'src="data:image/png' in page
    assert "Toys learn" in page and "✓ measured" in page and "width7-seed0" in page
    assert "FoX" not in page and "Forgetting" not in page
    again = run(work, "make", "report", "SUITE=toy")
    assert (
        "acp_repro.train" not in again
        and "acp_repro.measure" not in again
        and "analysis figure1" not in again
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="install make, e.g. apt install make")
def test_make_takes_the_file_of_a_suite_and_writes_nothing_beside_it(work, tmp_path):
    (file := tmp_path / "my.own.yaml").write_text(YAML)
    assert "Error against width" in run(work, "make", "help", f"SUITE={file}")
    run(work, "make", "report", f"SUITE={file}")
    assert f"make figure1 SUITE={file}<" in (work / "figures/my.own/report.html").read_text()
    assert list(tmp_path.iterdir()) == [file]
    again = run(work, "make", "report", f"SUITE={file}")
    assert "acp_repro" not in again and "analysis figure1" not in again
    assert "rm -rf runs/my.own " in run(work, "make", "clean", f"SUITE={tmp_path}/my.own.yaml")


def test_contributing_names_the_files_that_a_paper_has(work):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    modules = {path.stem for path in (work / "site" / "toy").glob("*.py")}
    assert set(re.findall(r"^\| `toy/(\w+)\.py` \|", text, re.M)) == modules - {"__init__"}


def test_its_commands_and_errors_are_those_of_every_paper(work):
    python = str(work / ".venv/bin/python")
    assert "width3-seed0" in run(work, python, "-m", "acp_repro.suite", "toy")
    error = run(work, python, "-m", "acp_repro.measure", "eror", "--suite", "toy", expect=2)
    assert "paper toy has no quantity 'eror'; did you mean error?" in error
    (work / "experiments" / "bad.yaml").write_text(YAML.replace("[3, 7]", "[0]"))
    error = run(work, python, "-m", "acp_repro.train", "--suite", "bad", expect=2)
    assert "experiments/bad.yaml: grid[0].width[0]: must be a whole number of at least 1, got 0" in error
    (work / "experiments" / "none.yaml").write_text(YAML.replace("paper: toy", "paper: toi"))
    error = run(work, python, "-m", "acp_repro.train", "--suite", "none", expect=2)
    assert "experiments/none.yaml: paper: no paper 'toi'; did you mean toy?" in error
