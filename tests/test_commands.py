"""How commands end: one-line errors, a message on Ctrl-C, no incomplete files."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from acp_repro import measure, train
from acp_repro.common import files
from acp_repro.pipeline import freshness
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.run_folder import lock
from tests.suites import YAML, train_run, write_suite

ROOT = Path(__file__).parent.parent
RUN, EXACT = "pro-tiny-128-acp", "pro-tiny-128-exact"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A working folder with one trained run."""
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_suite(folder)
        assert train.main(["--suite", "mini", "--run", RUN]) == 0
        yield folder


def start(*arguments, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of a shell ignore Ctrl-C, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_only_one_process_measures_at_a_time(work):
    with freshness.exclusive("measuring", "measures here"):
        second = start("acp_repro.measure", "throughput", "--suite", "mini", "--run", RUN)
        until = time.monotonic() + 60
        while not (line := second.stdout.readline()) and time.monotonic() < until:
            time.sleep(0.02)
        assert line == "waiting: another process measures here\n"
        time.sleep(0.3)
        assert second.poll() is None and not (work / "results/mini" / RUN / "throughput.csv").exists()
    output, error = second.communicate(timeout=120)
    assert second.returncode == 0 and f"results/mini/{RUN}/throughput.csv" in output, error


def test_full_disk_keeps_the_old_results_and_no_other_file(work, monkeypatch, capsys):
    assert measure.main(["loss", "--suite", "mini", "--run", RUN]) == 0
    folder = work / "results/mini" / RUN
    before, listed = (folder / "loss.csv").read_bytes(), sorted(folder.iterdir())

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "sync", full)
    assert measure.main(["loss", "--suite", "mini", "--run", RUN, "--force"]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: results/mini/") and "No space left on device" in error
    assert ".tmp" not in error
    assert (folder / "loss.csv").read_bytes() == before and sorted(folder.iterdir()) == listed


def test_symbolic_links_are_preserved_and_errors_name_the_file(tmp_path):
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    files.write_text(link, "through")
    assert link.is_symlink() and real.read_text() == "through"
    with pytest.raises(OSError, match="No space left on device: .*/link"), files.replacing(link):
        raise type("SafetensorError", (Exception,), {})("I/O error (os error 28)")
    with pytest.raises(FileNotFoundError, match="/no/input"), files.replacing(link):
        Path("/no/input").read_text()  # not the output file
    assert real.read_text() == "through" and sorted(tmp_path.iterdir()) == [link, real]


def test_closed_pipe_is_not_an_error():
    line = f"{sys.executable} -m acp_repro.suite paper | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("paper: ") and not done.stderr and done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_concurrent_runs_equal_separate_runs(work, device):
    suites = {f"together-{device}": "2", f"alone-{device}": "1"}
    for name, jobs in suites.items():
        write_suite(work, name=name)
        assert train.main(["--suite", name, "--device", device, "--jobs", jobs]) == 0
    for run in (RUN, EXACT):
        weights = [work / "runs" / name / run / "model/model.safetensors" for name in suites]
        assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't allocate memory: 9 bytes"), torch.OutOfMemoryError("9 GiB\nmore"), MemoryError()],
)
def test_out_of_memory_is_reported_in_one_line(capsys, monkeypatch, error):
    def load_suite(name):
        raise error

    monkeypatch.setattr(train, "load_suite", load_suite)
    assert train.main([]) == 1
    line = capsys.readouterr().err
    assert (
        line.startswith("error: there is not enough memory; use a smaller micro-batch")
        and line.count("\n") == 1
    )


@pytest.mark.slow
def test_concurrent_runs_end_with_their_command(work):
    """However it was killed; otherwise these runs would stay locked until they finish."""
    parent = start_training(work, "acp_repro.train", "--jobs 2")
    folders = [work / "runs/signals" / run for run in (RUN, EXACT)]
    parent.kill()
    parent.communicate(timeout=60)
    wait_until(lambda: not any(map(is_locked, folders)), 30)


LONG = YAML.replace("tokens: 1536", "tokens: 1536000").replace("seconds: 0", "seconds: 999")


def start_training(work, module, how):
    """A process that trains suite ``signals`` and has done some steps; ``how`` names the runs."""
    write_suite(work, LONG, name="signals")
    shutil.rmtree(work / "runs/signals", ignore_errors=True)
    process = start(module, "--suite", "signals", "--device", "cpu", *how.replace("RUN", RUN).split())
    runs = (RUN, EXACT) if "--jobs" in how else (RUN,)
    logs = [work / "runs/signals" / run / "metrics.jsonl" for run in runs]
    wait_until(lambda: all(log.is_file() and log.read_text().count("\n") > 2 for log in logs), 120)
    return process


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("--run RUN", signal.SIGINT),
        pytest.param("--jobs 2", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("--run RUN --nproc 2", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_signal_saves_a_checkpoint_and_reports_it(work, capsys, how, number):
    process = start_training(work, "acp_repro.train", how)
    runs = [run for run in load_suite("signals").runs if run.name == RUN or "--jobs" in how]
    process.send_signal(number)
    output, error = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in error, error
    for run in runs:
        (saved,) = (run.folder / "checkpoints").iterdir()
        step = int(saved.name.removeprefix("step-"))
        assert f"saved step {step} of 6000 in {saved}" in output + error
        train_run(run, stop_after=step + 1)
        assert f"continuing from step {step}\n" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["--run RUN", pytest.param("--jobs 2", marks=pytest.mark.slow)])
def test_second_ctrl_c_stops_immediately(work, how):
    (work / "stuck.py").write_text(
        "import sys, time\n"
        "from acp_repro import train\n"
        "from acp_repro.pipeline.training.run_folder import RunFolder\n"
        "RunFolder.save_checkpoint = lambda *_: time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(train.main())\n"
    )
    process = start_training(work, "stuck", how)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    assert not list(work.glob("runs/signals/*/checkpoints/step-*"))


def is_locked(folder):
    try:
        with lock(folder):
            return False
    except files.Locked:
        return True


def wait_until(true, seconds):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)
