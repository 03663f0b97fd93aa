"""First use: a missing environment, wrong options, signals to make, a log, a new suite."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from acp_repro import suite
from acp_repro.common import command
from acp_repro.pipeline.data import prepare
from acp_repro.pipeline.suite_file import load_suite

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "acp_repro.train": "",
    "acp_repro.measure": "loss",
    "acp_repro.make": "figure2",
    "acp_repro.suite": "",
    "acp_repro.data": "",
    "acp_repro.inspect": "pretrained/pro-13m-4k-acp",
    "acp_repro.generate": "pretrained/pro-13m-4k-acp --prompt x",
    "acp_repro.sweep_epsilon": "pretrained/pro-13m-4k-acp",
    "acp_repro.benchmark_decode": "",
    "analysis": "figure2",
    "analysis.report": "",
    "analysis.reproduction": "",
    "analysis.reproduction.claim": "",
}


@pytest.mark.parametrize("module", COMMANDS)
def test_missing_libraries_are_reported_in_one_line(module, tmp_path):
    import yaml

    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)  # as many systems have it
    line = [sys.executable, "-S", "-m", module, *COMMANDS[module].split()]
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        line, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: not installed: ") and "run `make setup`" in done.stderr


@pytest.mark.parametrize("module", ["acp_repro.train", "analysis"])
def test_old_python_is_reported_in_one_line(module):
    code = "import runpy, sys; sys.version_info, sys.version = (3, 10, 0), '3.10.0'\n"
    code += f"runpy.run_module({module!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "needs Python 3.11 or newer" in done.stderr and "is Python 3.10.0;" in done.stderr


@pytest.mark.parametrize("number", command.STOP_SIGNALS)
def test_signal_to_a_command_terminates_its_children(number):
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.pause()"
    before = signal.signal(number, signal.default_int_handler)  # a background job ignores SIGINT
    try:
        threading.Timer(1, os.kill, (os.getpid(), number)).start()
        begun = time.monotonic()
        assert command.run_words(f'python -c "{code}"') == command.STOPPED
    finally:
        signal.signal(number, before)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGKILL"])
def test_command_terminates_when_its_make_is_killed(name, tmp_path):
    """Make forwards none of these signals, and waits after the first two."""
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"from acp_repro.common import command; command.run_command(lambda: exec('{waits}'))"
    (tmp_path / "Makefile").write_text(f'all:\n\t@exec {sys.executable} -c "{code}"\n')
    started = subprocess.Popen(
        ["make", "-C", tmp_path, "--no-print-directory"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGINT, signal.SIGHUP)],
    )
    process = Path("/proc", started.stdout.readline().strip())
    time.sleep(1)
    started.send_signal(getattr(signal, name))
    until = time.monotonic() + 10
    while process.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert process.name.isdecimal() and not process.exists()
    started.communicate(timeout=10)


def test_progress_in_a_log_has_no_cursor_codes(capsys):
    bar = command.progress_bar(total=1000, desc="run", position=3, leave=True)
    bar.last_print_t -= 5  # the first line is due
    for _ in range(1000):
        bar.update()
    bar.close()
    log = capsys.readouterr().err
    assert not re.search(r"[\r\x1b]|\n\n", log) and log.count("\n") < 4 and "run: 100%" in log


def test_page_of_keys_is_current(capsys):
    assert suite.main(["--keys"]) == 0
    page = (ROOT / "docs/suite-keys.md").read_text()
    assert page.endswith(f"\n\n{capsys.readouterr().out}"), "run python -m acp_repro.suite --keys"


@pytest.mark.parametrize("documents", [1, 12])
def test_new_suite_fits_its_text(documents, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "my: #texts").mkdir()
    for number in range(documents):  # about 40,000 bytes
        words = " ".join(f"word{number * i % 91}" for i in range(6000 // documents))
        (folder / f"{number}.txt").write_text(words)
    assert suite.main(["--new", "mine.yaml", "--text", str(folder)]) == 0
    mine = load_suite("mine.yaml")
    assert "make figure2 SUITE=mine.yaml" in capsys.readouterr().out
    written = Path("mine.yaml").read_text()
    assert (
        suite.main(["--new", "mine.yaml", "--text", "my: #texts"]) == 2 and "--new" in capsys.readouterr().err
    )
    assert Path("mine.yaml").read_text() == written  # an existing file is never overwritten
    for run in mine.runs:
        for split in prepare(run.data).describe(run.context_length)["splits"].values():
            assert split["share_used"] > 0.4
    # The text size determines the contexts, so that Figure 2 has two bars of each kind.
    assert len({run.context_length for run in mine.runs}) == 2 and mine.pairs("pro") == list(mine.runs)
