"""Dependencies of a figure and their invalidation: the planner, its command, and the Makefile."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from acp_repro import make
from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline import planner
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.run import Run
from acp_repro.pipeline.suite_file import load_suite, suite_names
from analysis import drawing
from tests.analysis import synthetic
from tests.suites import YAML, run_here, write_suite

ROOT = Path(__file__).parent.parent
RUN, EXACT = "pro-tiny-128-acp", "pro-tiny-128-exact"


def kinds(suite, *goals):
    """The missing steps: runs to train, results to measure, and items to plot."""
    missing = planner.missing(suite, planner.targets(suite, goals))
    runs = {target.name for target in missing if isinstance(target, Run)}
    records = {(run and run.name, q.name) for run, q in (t for t in missing if isinstance(t, tuple))}
    return runs, records, {getattr(t, "name", t) for t in missing if not isinstance(t, Run | tuple)}


@pytest.mark.parametrize("name", [n for n in suite_names() if load_suite(n).file.published])
def test_published_results_are_plotted_without_training(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    suite = load_suite(name)
    drawn = [item.name for item in suite.paper.items if item.path(name).is_file()]
    assert kinds(suite, "all", *drawn)[:2] == (set(), set())


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A working folder whose Makefile runs this interpreter, with suite mini complete up to Figure 2."""
    folder = tmp_path_factory.mktemp("planner")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "GOALS"):  # set by an outer `make test`
            patch.delenv(name, raising=False)
        write_suite(folder)
        for name in ("Makefile", "pyproject.toml", "uv.lock"):
            shutil.copy(ROOT / name, folder)
        for name in ("acp_repro", "analysis"):
            (folder / name).symlink_to(ROOT / name)
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        (folder / ".venv/installed").touch()
        patch.setenv("PYTHONPATH", str(folder))
        patch.setattr(make, "run_words", run_here)
        assert make.main(["figure2", "--suite", "mini"]) == 0
        yield folder


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="install make, e.g. apt install make")


def run_make(*arguments, expect=0):
    done = subprocess.run(["make", *arguments], capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_second_run_only_plots_and_writes_identical_bytes(work, capsys):
    assert {path.name for path in Path("runs/mini").iterdir()} == {RUN}
    before = Path("figures/mini/figure2.png").read_bytes()
    for path in work.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (1, 1))  # the order of dates in a checkout is arbitrary
    assert make.main(["figure2", "--suite", "mini"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "python -m analysis figure2 --suite mini"
    assert Path("figures/mini/figure2.png").read_bytes() == before


def test_edit_rebuilds_only_what_it_affects(work, tmp_path):
    drawn = (set(), set(), {"figure2"})
    figure2 = ({RUN}, {(RUN, name) for name in PAPER.item("figure2").metrics}, {"figure2"})
    texts = {  # an edit of the suite, and the steps that it invalidates
        YAML + "# a comment\n": drawn,
        YAML.replace("timing_repeats: 1", "timing_repeats: 2"): (set(), *figure2[1:]),
        YAML.replace("warmup_tokens: 512", "warmup_tokens: 256"): figure2,
        YAML.replace("[-10, null]", "[-10, -5, null]"): drawn,
        # Keys that change how a run is trained but not its weights, or that select a run for measurement.
        YAML.replace("{batch_tokens", "{parallel: fsdp, compile: false, batch_tokens"): drawn,
        YAML.replace("loss_tokens: 256", "loss_tokens: 256, run_for_sweep: pro-tiny-128-acp"): drawn,
    }
    for text, expected in texts.items():
        write_suite(work, text)
        assert kinds(load_suite("mini"), "figure2") == expected
    write_suite(work)
    suite = load_suite("mini")
    assert kinds(suite, "figure2") == drawn
    # Training artifacts are irrelevant until a result is missing.
    shutil.move("runs/mini", tmp_path / "runs")
    assert kinds(suite, "figure2") == drawn
    record = PAPER.metric("pruned_ratio").path("mini", RUN).rename(tmp_path / "record")
    assert kinds(suite, "figure2") == figure2
    record.rename(PAPER.metric("pruned_ratio").path("mini", RUN))
    shutil.move(tmp_path / "runs", "runs/mini")


def test_make_heads_writes_the_page_of_the_present_weights(work):
    suite = load_suite("mini")
    command = f"python -m acp_repro.inspect runs/mini/{RUN}/model --html figures/mini/heads.html"
    assert planner.stages(suite, planner.missing(suite, planner.targets(suite, ["heads"]))) == [
        [(command, None)]
    ]


@pytest.fixture
def savings(tmp_path, monkeypatch):
    """Synthetic results of two runs for Figure 2."""
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    synthetic.write_savings()
    return Path("results/mini/pro-tiny-256-acp/pruned_ratio.csv")


DAMAGE = {
    "cut at the end of a line": lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    "another run's": lambda _: Path("results/mini/pro-tiny-512-acp/pruned_ratio.csv").read_text(),
    "cut in a value": lambda text: text[:-20],
    "another run's name": lambda text: text.replace("pro-tiny-256-acp", "pro-tiny-512-acp"),
    "not a number": lambda text: text.replace(",5,", ",nan,"),
    "infinite": lambda text: text.replace(",5,", ",inf,"),
    "a share of 7.5": lambda text: text.replace(",0.5,", ",7.5,"),
}


def test_modified_results_are_rejected(savings):
    before = savings.read_text()
    for name, damage in DAMAGE.items():
        assert damage(before) != before, name
        savings.write_text(damage(before))
        with pytest.raises(RecordError, match="is not the file of . rows that was measured"):
            drawing.draw("mini", "figure2")
    savings.write_text(before)
    assert drawing.draw("mini", "figure2").is_file()
    other = Path("results/mini/pro-tiny-512-acp")
    shutil.rmtree(other)
    shutil.copytree(savings.parent, other)  # results of one run in the folder of another
    with pytest.raises(RecordError, match=f"{other}/pruned_ratio.csv is not the file"):
        drawing.draw("mini", "figure2")


HOSTILE = (
    'x";touch$${IFS}pwned;"',
    "$(shell touch pwned)",
    "x;touch pwned",
    "`touch pwned`",
    "' $(touch pwned) '",
)


@needs_make
@pytest.mark.parametrize("words", HOSTILE)
def test_make_variables_are_not_expanded(work, words):
    """Not by make and not by a shell, whether recipes are executed or only printed."""
    stubs = Path("stubs")
    stubs.mkdir(exist_ok=True)
    for name in ("python", "pip"):
        (stubs / name).write_text('#!/bin/sh\necho "$@" >stubs/asked\nexit 1\n')
        (stubs / name).chmod(0o755)
    os.utime("pyproject.toml")  # so that setup installs
    for arguments in (
        [words, "BIN=stubs"],
        ["figure2", "BIN=stubs", f"SUITE={words}"],
        ["help", "BIN=stubs", f"SUITE={words}"],
        ["clean", "BIN=stubs", f"SUITE={words}"],
        ["claim", "BIN=stubs", f"ID={words}"],
        ["train", "BIN=stubs", "SUITE=mini", f"RUN={words}"],
        ["plan", "BIN=stubs", "SUITE=mini", f"GPU={words}"],
        ["-n", words, "BIN=stubs", f"JOBS={words}"],
        ["setup", "BIN=stubs", f"PIN={words}"],
        ["setup", f"PYTHON={words}"],
        ["help", f"PYTHON={words}", f"BIN={words}"],
        ["-n", "figure2", f"PYTHON={words}", f"BIN={words}", f"PIN={words}"],
    ):
        assert subprocess.run(["make", *arguments], capture_output=True).returncode or "-n" in arguments
        assert not Path("pwned").exists(), arguments
    os.utime(".venv/installed")
    assert f"-c {words} " in Path("stubs/asked").read_text()


@needs_make
def test_misspelt_variable_is_rejected(work):
    assert "SUIT is no variable of this Makefile; did you mean SUITE?" in run_make("SUIT=h100", expect=2)
    assert "the variables are SUITE RUN" in run_make("-n", "figure2", "DO=$(shell touch pwned)", expect=2)
    assert not Path("pwned").exists()


@needs_make
@pytest.mark.slow
def test_make_passes_its_goals_and_options_to_one_process(work):
    Path("asked").unlink(missing_ok=True)
    output = run_make("-n", "figure3", "figure4", "SUITE=mini", "NPROC=2", "JOBS=3")
    assert f"acp_repro.train --suite mini --run {RUN}" not in output  # it is already trained
    assert f"python -m acp_repro.train --suite mini --run {EXACT} --nproc 2 --jobs 3\n" in output
    assert f"python -m acp_repro.measure loss_curve loss --suite mini --run {RUN} --run {EXACT}\n" in output
    assert Path("asked").read_text().count("acp_repro.make") == 1
    assert not Path("runs/mini", EXACT).exists()
    run_make("figur2", "SUITE=mini", expect=2)
    run_make("-n", "clean", "SUITE=mini")
    assert Path("runs/mini").is_dir()


def test_published_files_are_not_deleted(work):
    write_suite(work, YAML + "published: true\n", name="ours")
    Path("results/ours").mkdir()
    assert make.main(["clean", "--suite", "ours"]) == 2 and Path("results/ours").is_dir()
    assert make.main(["clean", "--suite", "ours", "--force"]) == 0 and not Path("results/ours").exists()


def test_paper_libraries_are_installed_before_the_first_training(monkeypatch):
    monkeypatch.chdir(ROOT)
    suite = load_suite("lap")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "shap" or None)
    (first, *_), *_ = planner.stages(suite, [suite.runs[0]])
    assert first[0] == "make .venv/installed-lap"
    assert planner.stages(suite, []) == []
