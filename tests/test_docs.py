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
import tomllib
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
FOLDERS = "acp_repro|analysis|docs|experiments|figures|notebooks|pretrained|results|scripts|tests"
# What the chain makes is there after it ran.
MADE = re.compile(r"(figures|results)/(?!h100)|experiments/toy\.yaml")  # toy: of CONTRIBUTING.md
STANDS_FOR_OTHERS = re.compile(r"\b[A-Z]{3,}\b|[*{]")

texts = {page: page.read_text(encoding="utf-8") for page in PRESENT}
ids = {"ids": lambda page: str(page.relative_to(ROOT))}


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


@pytest.mark.parametrize("page", PRESENT, **ids)
def test_python_stands_in_blocks_that_run(page):
    """In no other kind of block, where a mistake would go unseen."""
    assert {language for _, language, _ in BLOCK.findall(texts[page])} <= {"", "python", "sh", "yaml", "toml"}
    others = [code for _, language, code in BLOCK.findall(texts[page]) if language != "python"]
    rest = "\n".join([*others, *re.findall(r"^    .*$", BLOCK.sub("", texts[page]), re.M)])
    assert not re.search(r"^ *(import|from) .*", rest, re.M)


@pytest.mark.parametrize("page", PAGES, **ids)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert heading in slugs, target


@pytest.mark.parametrize("page", PRESENT, **ids)
def test_files_exist(page):
    paths = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*[\w/])", texts[page])
    missing = [path for path in paths if not STANDS_FOR_OTHERS.search(path) and not (ROOT / path).exists()]
    # A link is relative to its page; that is looked at above.
    assert not [path for path in missing if not (page.parent / path).exists() and not MADE.match(path)]


@pytest.mark.parametrize("page", PRESENT, **ids)
def test_names_exist(page):
    for name in re.findall(r"`((?:acp_repro|analysis)(?:\.\w+)+)`", texts[page]):
        if module_file(name):
            continue
        module, _, attribute = name.rpartition(".")
        file = module_file(module)
        assert file and attribute in names_of(file), name
    for path, function in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", texts[page]):
        assert function in names_of(ROOT / path), f"{path}::{function}"


@pytest.mark.parametrize("page", PRESENT, **ids)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M)) | {"NAME"}
    for paper in map(find_paper, paper_names()):
        targets |= {item.name for item in paper.items}
        targets |= {made.name for made in paper.pages}
    for line in command_lines(texts[page]):
        if line.startswith("make "):
            named = [word for word in line.split()[1:] if "=" not in word and word != "-n"]
            assert set(named) <= targets, line
            assert all(re.search(rf"\b{key}\b", makefile) for key in re.findall(r"\b(\w+)=", line)), line


@pytest.mark.parametrize("page", PRESENT, **ids)
def test_suites_exist(page):
    suites = {path.stem for path in (ROOT / "experiments").glob("*.yaml")}
    suites |= {"NAME", "name", "SUITE", "S", "toy"}  # toy: of CONTRIBUTING.md
    for line in command_lines(texts[page]):
        assert set(re.findall(r"(?:SUITE=|--suite )([\w-]+)", line)) <= suites, line


def commands() -> list[str]:
    """Each module or script that a page runs, with its arguments."""
    run = re.compile(r".*(?:python -m|-m --|python) ((?:acp_repro|analysis|scripts/|notebooks/)\S.*)")
    matches = (run.fullmatch(line) for text in texts.values() for line in command_lines(text))
    return sorted({match[1].rstrip(".") for match in matches if match})


class Parsed(BaseException):
    """The parser took the arguments; what they ask for is not done."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", commands())
def test_commands_parse(command, monkeypatch):
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
    assert ended.type is Parsed or ended.value.code == 0  # --help


# What needs nothing but the clone and ends in seconds; the others train, or time, or take a user's files.
QUICK = re.compile(
    r"acp_repro\.(inspect|generate|suite|plan|compare|lap\.compress|retention\.show) .*(pretrained|cpu|h100)"
)


@pytest.mark.slow
@pytest.mark.parametrize("command", [*filter(QUICK.match, commands())])
def test_quick_commands_run(command, tmp_path):
    for name in ("acp_repro", "experiments", "pretrained", "results", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("page", PRESENT, **ids)
def test_extras_exist(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for names in re.findall(r"'\.\[([\w,]+)\]'", texts[page]) for name in names.split(",")]
    if page == ROOT / "README.md":
        table = texts[page].partition("| extra |")[2].partition("\n\n")[0]
        rows = [row.split("|")[1] for row in table.splitlines()[2:]]
        named += [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        assert set(named) == set(extras)
    assert set(named) <= set(extras)


def test_pre_commit_and_make_run_the_same_ruff():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pins = re.findall(r"^ruff==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    assert set(re.findall(r"ruff==[\d.]+", hooks)) == set(pins) and len(pins) == 1


def test_the_citation_names_both_papers():
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    papers = [entry for entry in citation["references"] if entry["type"] == "conference-paper"]
    assert [entry["identifiers"][0]["value"] for entry in papers] == ["arXiv:2504.06949", "arXiv:2503.02130"]
