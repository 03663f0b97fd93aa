"""What Make would do: nothing on a clone that has its records, the right things after an edit."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from acp_repro.chain import state
from acp_repro.chain.rules import is_usual
from acp_repro.chain.suite import load_suite
from acp_repro.papers.acp.paper import PAPER

ROOT = Path(__file__).parent.parent
QUANTITIES = [quantity for quantity in PAPER.quantities if not quantity.command]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="install make, e.g. apt install make")


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)])
def clone(tmp_path, monkeypatch, request):
    """A clone with the records and some figures of suite h100, its files in a random order of age."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # or every call would compile all modules
    for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):  # of the `make test` that runs this
        monkeypatch.delenv(name, raising=False)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("acp_repro", "analysis", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    suite = load_suite("h100")
    for run in suite.runs:
        for quantity in QUANTITIES:
            path = quantity.path("h100", run.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        state.write_settings(suite, run, QUANTITIES)
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
    done = subprocess.run(["make", "-n", *arguments], capture_output=True, text=True, check=True)
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
    Path(".venv/bin/python").write_text(f'#!/bin/sh\necho "$2" >> asked\nexec "{sys.executable}" "$@"\n')
    output = would_do("all", "SUITE=h100")
    assert chain(output) == [set(), set()] and "analysis.acp.figure2" in output
    assert "installing the extra" not in output
    os.utime("experiments/h100.yaml")  # as a later checkout of the same text would
    assert chain(would_do("all", "SUITE=h100")) == [set(), set()]
    # Each call makes the rules once, also where Make starts anew with them.
    assert Path("asked").read_text() == 2 * "acp_repro.chain.rules\n"


def test_the_harness_is_installed_for_records_that_lack(clone):
    # Asked for once a record, and each time without a look at the rules.
    assert "installing the extra eval" in would_do(".venv/installed-eval") and not Path(".make").exists()
    PAPER.quantity("lm_eval").path("h100", "pro-125m-4k-acp").unlink()
    output = would_do("table1", "SUITE=h100")
    install, measure = output.index("installing the extra eval"), output.index("acp_repro.measure lm_eval")
    assert install < measure and "-e '.[eval]'" in output
    Path(".venv/installed-eval").touch()
    assert "installing the extra" not in would_do("table1", "SUITE=h100")


def test_an_edit_redoes_its_own_runs_whether_make_ran_before_or_not(clone):
    would_do("figure10", "SUITE=h100")
    edit("h100", "125M: {num_hidden_layers: 12", "125M: {num_hidden_layers: 13")
    again = {"pro-125m-4k-acp", "pro-125m-8k-acp", "pro-125m-16k-acp"}
    assert chain(would_do("figure2", "SUITE=h100")) == [again, again]
    assert chain(would_do("figure2", "SUITE=h100")) == [again, again]  # until it is done
    shutil.rmtree(".make")  # now as if the edit had come before the first make
    assert chain(would_do("figure2", "SUITE=h100")) == [again, again]


def items(names):
    return set(names.split())


# Of suite h100.
PAGES = {"report", "reproduction"}
GRID = items("figure1 figure2 figure3 figure4 figure5 figure6 figure8 figure10 table4 figureA2 figureA3")
EVERY = GRID | items("figure7 table2 figureA1 figureA5") | PAGES
DEPENDS = {
    # What all figures are made with: how they look, and what says of which runs they are.
    "analysis/style.py": EVERY,
    "analysis/acp/paper_values.csv": EVERY,
    "acp_repro/common/files.py": EVERY,
    "acp_repro/chain/suite.py": EVERY,
    "acp_repro/papers/acp/paper.py": EVERY,
    "acp_repro/papers/acp/settings.py": EVERY,
    "acp_repro/data/config.py": EVERY,
    "experiments/h100.yaml": EVERY,
    # One figure, or a part that some share.
    "analysis/acp/figure7.py": items("figure7") | PAGES,
    "analysis/acp/figure2.py": items("figure2 figure10") | PAGES,
    "analysis/acp/figure4.py": items("figure4 figure5") | PAGES,
    "analysis/acp/sweeps.py": items("figure7 figureA1 figureA2 figureA3") | PAGES,
    "acp_repro/papers/acp/grid.py": GRID | PAGES,
    # Claims of no figure, and another paper's.
    "analysis/acp/text_claims.py": PAGES,
    "analysis/retention/table1.py": {"reproduction"},
    "experiments/lap-h200.yaml": {"reproduction"},
    # The pages themselves.
    "analysis/report/page.py": {"report"},
    "analysis/report/report.css": PAGES,  # REPRODUCTION.md takes modules beside it
    "analysis/reproduction/page.py": {"reproduction"},
    # Records: of a figure, and of none that `make all` draws, which the pages show nevertheless.
    "results/h100/pro-125m-16k-acp/block_size.csv": items("figureA2") | PAGES,
    "results/h100/pro-125m-16k-acp/needle.csv.gz": PAGES,
    "results/h100/benchmark/kernel_time.csv": PAGES,
    "figures/h100/figure_kernel.md": {"report"},
    # What trains and measures.
    "acp_repro/attention/triton/forward.py": set(),
    "acp_repro/attention/op.py": set(),
    "acp_repro/model/fox.py": set(),
    "acp_repro/training/loop.py": set(),
    "acp_repro/papers/acp/trained.py": set(),
    # Columns and runs of a quantity, beside how it is measured.
    "acp_repro/papers/acp/measure/block_size.py": items("figureA2") | PAGES,
    "acp_repro/papers/acp/measure/throughput.py": items("figure2 figure10") | PAGES,
}


@pytest.mark.parametrize("clone", [0], indirect=True)
def test_an_edit_redraws_all_that_depends_on_it_and_no_more(clone):
    suite = load_suite("h100")
    for quantity in (quantity for quantity in PAPER.quantities if quantity.command):
        quantity.path("h100").parent.mkdir(exist_ok=True)
        quantity.path("h100").touch()
        os.utime(quantity.path("h100"), (1.7e9, 1.7e9))
    usual = [item.path("h100") for item in PAPER.items if item.runs(suite) and is_usual(suite, item)]
    kernel = Path("figures/h100/figure_kernel.md")  # drawn by its own name alone
    for path in (kernel, *usual, Path("figures/h100/report.html"), Path("REPRODUCTION.md")):
        path.touch()

    def redrawn():
        # A touch changes no import, so the rules need not be made again each time.
        output = would_do("report", "reproduction", "SUITE=h100", "-o", ".make/h100.mk")
        assert chain(output) == [set(), set()]
        commands = re.findall(r"-m analysis\.(\S+)(?: ((?:figure|table)\w+))?", output)
        return {item or module.removeprefix("acp.") for module, item in commands}

    would_do("report", "SUITE=h100")  # makes the rules
    assert redrawn() == set()
    for name, depends in DEPENDS.items():
        then = Path(name).stat().st_mtime_ns
        os.utime(name)
        assert redrawn() == depends, name
        os.utime(name, ns=(then, then))
    assert redrawn() == set()


STAND_IN = """
import json, pathlib, sys
from acp_repro.chain import state
from acp_repro.chain.suite import load_suite
from acp_repro.common import files

said = sys.argv[1:]
with open("asked", "a") as log:
    print(*said, file=log)
suite = load_suite("h100")
if "acp_repro.train" in said or "acp_repro.measure" in said:
    run = suite.run(said[said.index("--run") + 1])
if "acp_repro.train" in said:
    files.write_json(run.folder / "run.json", {"settings": run.as_dict()})
    files.write_json(run.folder / "done.json", {"sha256": "first"})
    files.write_text(run.weights_file, "")
elif "acp_repro.measure" in said:
    quantities = [suite.paper.quantity(name) for name in said[2 : said.index("--suite")]]
    for quantity in quantities:
        files.write_text(quantity.path("h100", run.name), "")
    state.write_settings(suite, run, quantities)
else:
    files.write_text("figures/h100/figure2.png", "")
"""


@pytest.mark.parametrize("clone", [0], indirect=True)
def test_what_a_call_makes_is_made_once_and_follows_the_weights(clone):
    Path("stand_in.py").write_text(STAND_IN)
    Path(".venv/bin/python").write_text(
        f'#!/bin/sh\ncase "$2" in acp_repro.chain.*) exec {sys.executable} "$@";; esac\n'
        f'PYTHONPATH=. exec {sys.executable} stand_in.py "$@"\n'
    )

    def asked():
        Path("asked").write_text("")
        subprocess.run(["make", "figure2", "SUITE=h100"], capture_output=True, text=True, check=True)
        lines = Path("asked").read_text().splitlines()
        assert len(lines) == len(set(lines)), lines
        return chain("\n".join(lines)), sum("analysis." in line for line in lines)

    runs = [f"pro-125m-{length}-acp" for length in ("4k", "8k", "16k")]
    assert asked() == ([set(), set()], 1)  # a fresh clone
    edit("h100", "125M: {num_hidden_layers: 12", "125M: {num_hidden_layers: 13")
    assert asked() == ([set(runs)] * 2, 1)
    assert asked() == ([set()] * 2, 0)
    # Other weights of the same settings, whatever their date.
    done = Path("runs/h100") / runs[0] / "done.json"
    done.write_text('{"sha256": "second"}')
    os.utime(done, (1.6e9, 1.6e9))
    assert asked() == ([set(), {runs[0]}], 1)
    assert asked() == ([set()] * 2, 0)
    # Weights that are gone are trained again for a record that lacks, and with it go the others of the run.
    shutil.rmtree("runs/h100")
    assert asked() == ([set()] * 2, 0)
    PAPER.quantity("pruned_ratio").path("h100", runs[0]).unlink()
    trained, measured = asked()[0]
    assert trained == measured == {runs[0]}
    assert asked() == ([set()] * 2, 0)


def test_a_run_that_is_new_in_the_grid_is_the_only_one_done(clone):
    would_do("figure2", "SUITE=h100")
    edit("h100", "context_length: [4096, 8192, 16384]", "context_length: [2048, 4096, 8192, 16384]")
    assert chain(would_do("figure2", "SUITE=h100")) == [{"pro-125m-2k-acp"}] * 2


def test_ready_weights_are_measured_and_never_trained(clone):
    suite = load_suite("pretrained")
    (run,) = suite.runs
    failed = subprocess.run(["make", "figure4", "SUITE=pretrained"], capture_output=True, text=True)
    assert failed.returncode and "it comes with the project: git checkout" in failed.stdout
    run.model_folder.mkdir(parents=True)
    (run.model_folder / "model.safetensors").touch()
    assert chain(would_do("figure4", "SUITE=pretrained")) == [set(), {run.name}]
    record = PAPER.quantity("pruned_ratio").path("pretrained", run.name)
    record.parent.mkdir(parents=True)
    record.touch()
    state.write_settings(suite, run, [])
    assert chain(would_do("figure4", "SUITE=pretrained")) == [set(), set()]
    edit("pretrained", "corpus: stdlib", "corpus: stdlib\n  heldout: 0.1")
    assert chain(would_do("figure4", "SUITE=pretrained")) == [set(), {run.name}]


def test_a_page_of_heads_follows_the_weights_and_its_own_sources(clone):
    (run,) = load_suite("pretrained").runs
    run.model_folder.mkdir(parents=True)
    (run.model_folder / "model.safetensors").touch()
    page = Path("figures/pretrained/heads.html")
    command = f"acp_repro.inspect {run.model_folder} --html {page}"
    assert command in would_do("heads", "SUITE=pretrained")
    page.parent.mkdir(parents=True)
    page.touch()
    os.utime(run.model_folder / "model.safetensors", (1.6e9, 1.6e9))
    assert command not in would_do("heads", "SUITE=pretrained")
    os.utime("acp_repro/heads/page/head.js")
    assert command in would_do("heads", "SUITE=pretrained")
    assert chain(would_do("heads", "SUITE=h100"))[0] == {load_suite("h100").heads_run.name}


@pytest.mark.parametrize("clone", [0], indirect=True)
def test_a_report_is_made_anew_where_the_page_that_it_links_to_is_gone_or_comes(clone):
    report, suite = Path("figures/h100/report.html"), load_suite("h100")
    for path in [*(item.path("h100") for item in PAPER.items if item.runs(suite)), report]:
        path.touch()
    asked = {"report": False, "report heads": True}  # no page, and no link to one
    for goals, made in asked.items():
        assert ("analysis.report" in would_do(*goals.split(), "SUITE=h100")) == made, goals
    report.write_text('<a href="heads.html">')
    assert "analysis.report" in would_do("report", "SUITE=h100")


def test_a_measure_that_fails_costs_no_record(clone):
    suite = load_suite("pretrained")
    run = suite.runs[0]
    (folder := run.model_folder).mkdir(parents=True)
    (folder / "model.safetensors").write_text("no weights")
    records = [quantity.path("pretrained", run.name) for quantity in QUANTITIES[:3]]
    records[0].parent.mkdir(parents=True)
    for path in records:
        path.touch()
    state.write_settings(suite, run, [])
    edit("pretrained", "corpus: stdlib", "corpus: stdlib\n  heldout: 0.1")
    failed = subprocess.run(["make", "figure4", "SUITE=pretrained"], capture_output=True, text=True)
    assert failed.returncode and "acp_repro.measure" in failed.stdout
    assert all(path.exists() for path in records), failed.stdout + failed.stderr


def test_a_stop_while_a_second_run_trains_keeps_the_weights_of_the_first(clone):
    weights = load_suite("cpu").runs[0].weights_file
    weights.parent.mkdir(parents=True)
    stop = f"touch {weights}; kill -TERM $PPID; exec sleep 5"
    python = Path(".venv/bin/python")
    python.write_text(python.read_text().replace("exec", f"case $2 in acp_repro.train) {stop};; esac\nexec"))
    done = subprocess.run(["make", "figure2"], capture_output=True, text=True)
    assert done.returncode and "acp_repro.train" in done.stdout and weights.exists(), done.stderr


def test_several_gpus_and_the_plan(clone):
    output = would_do("train", "SUITE=paper", "RUN=pro-760m-16k-acp", "NPROC=4")
    assert "acp_repro.train --nproc 4 --suite paper --run pro-760m-16k-acp" in output
    assert "acp_repro.train --jobs 6 --suite paper" in would_do("train", "SUITE=paper", "JOBS=6")
    assert "acp_repro.plan --suite paper --gpu a100 --nproc 8" in " ".join(
        would_do("plan", "SUITE=paper", "GPU=a100", "NPROC=8").split()
    )
    assert not Path(".make").exists()  # neither needs to know the rules


def test_every_item_has_its_target_and_what_lacks_runs_says_which(clone):
    said = would_do(*(item.name for item in PAPER.items), "SUITE=paper")
    assert "nothing is called" not in said
    done = subprocess.run(["make", "figure11", "SUITE=h100"], capture_output=True, text=True)
    assert "has no run of FoX (LLaMA) both with ACP and exact" in done.stderr
    done = subprocess.run(["make", "figure2", "SUITE=h200-needle"], capture_output=True, text=True)
    assert "runs that train with needles are for Figure A6 alone" in done.stderr


def fails(*arguments):
    done = subprocess.run(["make", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    return done.stdout, done.stderr


def test_a_name_that_is_none_is_answered_with_those_that_are(clone):
    _, error = fails("figure99", "SUITE=h100")
    line, _ = error.splitlines()
    assert line.startswith("error: nothing is called figure99; suite h100 has figure1 figure2 ")
    for goal in (["help"], []):
        output, error = fails(*goal, "SUITE=cpuu")
        assert "experiments/cpuu.yaml: no such suite; there are: cpu " in error and not output


def test_a_suite_that_cannot_be_read_has_no_list_of_figures(clone):
    edit("h100", "grid:", "gird:")
    assert "experiments/h100.yaml: gird: unknown key; did you mean grid?" in fails("help", "SUITE=h100")[1]


@pytest.mark.parametrize("clone", [0], indirect=True)
def test_help_says_what_it_can_before_anything_is_installed(clone):
    shutil.rmtree(".venv")
    python = Path("python")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without what is installed
    python.chmod(0o755)
    arguments = ["make", "help", "PYTHON=./python"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    *_, title, line = done.stdout.splitlines()
    assert title == "Figures and tables, each made with all that it needs:" and not done.stderr
    assert line == "  make figure2 is one; make setup installs what lists them all"
    assert "make reproduction  one page with a verdict on every claim" in done.stdout


@pytest.mark.parametrize("fits", [True, False])
def test_what_keeps_an_environment_from_being_made(clone, fits):
    shutil.rmtree(".venv")
    Path(".venv").touch()  # as little of a folder as one in a place that nobody may write to
    python = Path("python")
    ensurepip = f"case $2 in *ensurepip*) exit {1 - fits};; esac"
    python.write_text(f'#!/bin/sh\n{ensurepip}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    output = "".join(fails("setup", "PYTHON=./python"))
    assert ("apt install python3-venv" in output) != fits
    assert (f"{clone}/.venv cannot be made, see above; clone into a folder that" in output) == fits


def test_to_look_at_another_run_makes_no_record_old(clone):
    path = clone / "experiments/h100.yaml"
    text = path.read_text()
    assert "  heads_run: pro-125m-16k-acp" in text
    path.write_text(text.replace("  heads_run: pro-125m-16k-acp", "  heads_run: pro-125m-4k-acp"))
    assert not {"acp_repro.train", "acp_repro.measure"} & set(would_do("figure2", "SUITE=h100").split())


def test_a_figure_measures_what_it_draws_and_no_more(clone):
    run = load_suite("h100").heads_run
    for quantity in QUANTITIES:
        quantity.path("h100", run.name).unlink()
    (line,) = [x for x in would_do("figure4", "SUITE=h100").splitlines() if "acp_repro.measure" in x]
    assert f"measure pruned_ratio --suite h100 --run {run.name} --for figure4" in line
