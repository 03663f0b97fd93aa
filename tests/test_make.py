"""What Make would do: nothing on a clone that has its records, the right things after an edit."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from acp_repro.records import path_of, settings_path, write_settings

from acp_repro.chain.suite import load_suite

ROOT = Path(__file__).parent.parent
QUANTITIES = (
    "pruned_ratio",
    "attention_time",
    "throughput",
    "loss",
    "loss_curve",
    "decay",
    "attention_weights",
    "epsilon_sweep",
    "pruned_mass",
    "block_size",
    "long_context",
)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="install make, e.g. apt install make")


@pytest.fixture(params=[0, 1])
def clone(tmp_path, monkeypatch, request):
    """A clone with the records and some figures of suite h100, its files in a random order of age."""
    monkeypatch.chdir(tmp_path)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("acp_repro", "analysis", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    suite = load_suite("h100")
    for run in suite.runs:
        for quantity in QUANTITIES:
            path = path_of("h100", run.name, quantity)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        write_settings(run, suite.measure, QUANTITIES)
    figures = tmp_path / "figures" / "h100"
    figures.mkdir(parents=True)
    (figures / "figure4.png").touch()
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    order = random.Random(request.param)
    for path in files:
        when = 1.7e9 + order.random()
        os.utime(path, (when, when))
    # What `make setup` leaves: an interpreter, and a file newer than what it was made from.
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / "installed").touch()
    return tmp_path


def would_do(*arguments):
    done = subprocess.run(
        ["make", "-n", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    return done.stdout


def chain(output):
    """The runs that would be trained and measured."""
    lines = output.replace("\\\n", " ").splitlines()
    return [
        {line.split("--run ")[1].split()[0] for line in lines if f"acp_repro.{step} " in line}
        for step in ("train", "measure")
    ]


def edit(name, old, new):
    path = Path("experiments") / f"{name}.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_fresh_clone_only_draws(clone):
    output = would_do("all", "SUITE=h100")
    assert chain(output) == [set(), set()] and "analysis.figure2" in output
    os.utime("experiments/h100.yaml")  # as a later checkout of the same text would
    assert chain(would_do("all", "SUITE=h100")) == [set(), set()]


def test_an_edit_redoes_its_own_runs_whether_make_ran_before_or_not(clone):
    would_do("figure10", "SUITE=h100")
    for _ in range(2):
        edit("h100", "125M: {num_hidden_layers: 12", "125M: {num_hidden_layers: 13")
        again = {"pro-125m-4k-acp", "pro-125m-8k-acp", "pro-125m-16k-acp"}
        assert chain(would_do("figure2", "SUITE=h100")) == [again, again]
        assert chain(would_do("figure2", "SUITE=h100")) == [again, again]  # until it is done
        shutil.rmtree(".make")  # now as if the edit had come before the first make
        edit("h100", "num_hidden_layers: 13", "num_hidden_layers: 12")


def test_a_run_that_is_new_in_the_grid_is_the_only_one_done(clone):
    would_do("figure2", "SUITE=h100")
    edit("h100", "context_length: [4096, 8192, 16384]", "context_length: [2048, 4096, 8192, 16384]")
    assert chain(would_do("figure2", "SUITE=h100")) == [{"pro-125m-2k-acp"}] * 2


def test_ready_weights_are_measured_and_never_trained(clone):
    (run,) = load_suite("pretrained").runs
    failed = subprocess.run(["make", "figure4", "SUITE=pretrained"], capture_output=True, text=True)
    assert failed.returncode and "it comes with the project: git checkout" in failed.stdout
    run.model_folder.mkdir(parents=True)
    (run.model_folder / "model.safetensors").touch()
    assert chain(would_do("figure4", "SUITE=pretrained")) == [set(), {run.name}]
    settings_path(run).parent.mkdir(parents=True)
    for quantity in ("pruned_ratio", "attention_time", "throughput"):
        path_of("pretrained", run.name, quantity).touch()
    assert chain(would_do("figure4", "SUITE=pretrained")) == [set(), set()]
    edit("pretrained", "corpus: stdlib", "corpus: stdlib\n  heldout: 0.1")
    assert chain(would_do("figure4", "SUITE=pretrained")) == [set(), {run.name}]


def test_a_measure_that_fails_costs_no_record(clone):
    run = load_suite("pretrained").runs[0]
    (folder := run.model_folder).mkdir(parents=True)
    (folder / "model.safetensors").write_text("no weights")
    records = [path_of("pretrained", run.name, quantity) for quantity in QUANTITIES[:3]]
    settings_path(run).parent.mkdir(parents=True)
    for path in records:
        path.touch()
        os.utime(path, (1.6e9, 1.6e9))
    failed = subprocess.run(["make", "figure4", "SUITE=pretrained"], capture_output=True, text=True)
    assert failed.returncode and "acp_repro.measure" in failed.stdout
    assert all(path.exists() for path in records), failed.stdout + failed.stderr


def test_several_gpus_and_the_plan(clone):
    output = would_do("train", "SUITE=paper", "RUN=pro-760m-16k-acp", "NPROC=4")
    command = "torch.distributed.run --standalone --nproc-per-node 4 -m -- acp_repro.train"
    assert f"{command} --suite paper --run pro-760m-16k-acp" in output
    assert "acp_repro.plan --suite paper --gpu a100 --nproc 8" in " ".join(
        would_do("plan", "SUITE=paper", "GPU=a100", "NPROC=8").split()
    )
    assert not Path(".make").exists()  # neither needs to know the runs
