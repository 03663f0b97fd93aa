"""The complexity budget of budget.toml: statements and the public surface. Its limits may fall, not rise."""

import ast
import dataclasses
import tomllib
import typing
from pathlib import Path

import acp_repro
from acp_repro import attention, explorer, hf, lap, model, retention
from acp_repro.pipeline import paper_registry

ROOT = Path(__file__).parent.parent
LIBRARY = (acp_repro, attention, model, hf, explorer, retention, lap)
BUDGET = tomllib.loads((ROOT / "budget.toml").read_text())


def count_statements(folder: str, pattern: str = "**/*.py") -> int:
    """The number of statements in a folder without docstrings, which is independent of line breaks."""
    files = sorted((ROOT / folder).glob(pattern))
    assert files, folder
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count_surface() -> dict[str, int]:
    sources = [path for top in ("acp_repro", "analysis") for path in (ROOT / top).rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    options = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
        if str(node.args[0].value).startswith("--") and any(key.arg == "help" for key in node.keywords)
    ]
    keys: set[tuple[type, str]] = set()
    for name in paper_registry.paper_names():
        collect_keys(paper_registry.find_paper(name).file, keys)
    commands = [path for path in (ROOT / "acp_repro").glob("*.py") if "run_command(main)" in path.read_text()]
    return {
        "commands": len(commands),
        "options": len(options),
        "yaml_keys": len(keys),
        "raises": sum(isinstance(node, ast.Raise) for node in nodes),
        "excepts": sum(isinstance(node, ast.ExceptHandler) for node in nodes),
        "imports_inside_functions": sum(
            isinstance(inner, ast.Import | ast.ImportFrom)
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            for inner in ast.walk(node)
        ),
        "public_names": sum(len(package.__all__) for package in LIBRARY),
    }


def collect_keys(kind: object, keys: set[tuple[type, str]]) -> None:
    """Adds the suite-file keys that a type and its nested types declare."""
    for inner in typing.get_args(kind):
        collect_keys(inner, keys)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if (kind, field.name) not in keys:
                keys.add((kind, field.name))
                collect_keys(hints[field.name], keys)


def check(counted: dict[str, int], allowed: dict[str, int]) -> None:
    assert counted.keys() == allowed.keys()
    over = {name: (count, allowed[name]) for name, count in counted.items() if count > allowed[name]}
    assert not over, f"over the budget (count, allowed): {over}; remove something first"


def test_code_stays_within_its_budget():
    check({folder: count_statements(folder) for folder in BUDGET["statements"]}, BUDGET["statements"])
    check({"acp_repro": count_statements("acp_repro", "*.py")}, BUDGET["commands"])
    check(count_surface(), BUDGET["surface"])
