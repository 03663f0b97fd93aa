"""README and docs/: their Python runs, and what they name is there."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from acp_repro.pipeline.registry import find_paper, paper_names

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "REPRODUCTION.md",
    ROOT / "notebooks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("pretrained/*/README.md")),
]
# A notebook of what was done keeps the names of its day.
PRESENT = [page for page in PAGES if page.name != "lab-notebook.md"]
texts = {page: page.read_text(encoding="utf-8") for page in PRESENT}
ALL = "\n".join(texts.values())


# A block that cannot run has its reason in a comment above it, which no reader sees.
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^ *```(\w*)\n(.*?)^ *```$", re.S | re.M)


def python_that_runs(text: str) -> str:
    blocks = BLOCK.findall(text)
    return "".join(dedent(code) for reason, language, code in blocks if language == "python" and not reason)


def command_lines(text: str) -> list[str]:
    """Lines of indented or fenced code, and what stands in backticks, without comments and line breaks."""
    fenced = "\n".join(code for _, _, code in BLOCK.findall(text))
    rest = BLOCK.sub("", text)
    lines = [*fenced.splitlines(), *re.findall(r"^    (.*)$", rest, re.M)]
    quoted = [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", rest)]
    return [part.strip() for line in [*lines, *quoted] for part in line.split(" #")[0].split("&&")]


def module_file(name: str) -> Path | None:
    """The file of one of our modules, found without an import."""
    path = ROOT / name.replace(".", "/")
    files = [path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"]
    return next((file for file in files if file.is_file()), None)


def names_of(path: Path) -> set[str]:
    """Functions, classes and variables of a module, imported ones too."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


# Each page in a process of its own; they share an import of torch.
RUNNER = """
import json, os, sys, traceback
import torch, acp_repro
for page, code in json.load(sys.stdin).items():
    if not os.fork():
        try:
            exec(compile(code, page, "exec"), {"__name__": "__main__"})
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    if os.wait()[1]:
        sys.exit(page)
"""


@pytest.mark.slow
def test_python_runs():
    pytest.importorskip("safetensors", reason="pip install '.[checkpoints]'")
    pytest.importorskip("tokenizers", reason="pip install '.[bpe]'")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    scripts = {
        str(page.relative_to(ROOT)): code for page in PRESENT if (code := python_that_runs(texts[page]))
    }
    assert len(scripts) > 4
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(scripts),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_names_exist():
    names = set(re.findall(r"`((?:acp_repro|analysis)(?:\.\w+)+)`", ALL))
    modules = {name for name in names if module_file(name)}
    assert modules < names
    for name in names - modules:
        module, _, attribute = name.rpartition(".")
        assert attribute in names_of(module_file(module)), name
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", ALL)
    assert tests
    for path, function in tests:
        assert function in names_of(ROOT / path), f"{path}::{function}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M)) | {"NAME", "heads"}
    for paper in map(find_paper, paper_names()):
        targets |= {item.name for item in paper.items}
    lines = [line for line in command_lines(ALL) if line.startswith("make ")]
    assert any("=" in line for line in lines)
    for line in lines:
        named = [word for word in line.split()[1:] if "=" not in word and word != "-n"]
        assert set(named) <= targets, line
        keys = set(re.findall(r"\b(\w+)=", line))
        assert keys <= set(re.findall(r"\w+", makefile)), line


def commands() -> list[str]:
    """Each module or script that a page runs, with its arguments."""
    run = re.compile(r".*(?:python -m|-m --|python) ((?:acp_repro|analysis|scripts/|notebooks/)\S.*)")
    matches = map(run.fullmatch, command_lines(ALL))
    return sorted({match[1].rstrip(".") for match in matches if match})


class Parsed(BaseException):
    """The parser took the arguments; what they ask for is not done."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", commands())
def test_commands_parse(command, monkeypatch, capsys):
    """Its module exists, and its parser takes its arguments; a command that is only named has none."""
    name, *arguments = shlex.split(command)
    script = name.endswith(".py")
    assert (ROOT / name).is_file() if script else module_file(name), command
    if not arguments:
        return

    def parse(parser, *given):
        parser.allow_abbrev = False
        parse_args(parser, *given)
        raise Parsed

    parse_args = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises((Parsed, SystemExit)) as ended:
        if script:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__")
    if ended.type is SystemExit and ended.value.code:  # --help has code 0
        assert "does not exist" in capsys.readouterr().err  # a file that a reader is to have
