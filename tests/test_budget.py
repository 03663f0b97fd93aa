"""The budget: what the project may weigh and promise. Its numbers may fall, not rise (CONTRIBUTING.md)."""

import ast
import dataclasses
import tomllib
import typing
from pathlib import Path

from acp_repro.pipeline import registry

ROOT = Path(__file__).parent.parent
BUDGET = tomllib.loads((ROOT / "budget.toml").read_text())


def count_lines(folder: str, pattern: str = "**/*.py") -> int:
    files = sorted((ROOT / folder).glob(pattern))
    assert files, folder
    return sum(len(path.read_bytes().splitlines()) for path in files)


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
    for name in registry.paper_names():
        collect_keys(registry.find_paper(name).file, keys)
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
        "files_under_60_lines": sum(
            len(path.read_bytes().splitlines()) < 60 for path in sources if path.name != "__init__.py"
        ),
    }


def collect_keys(kind: object, keys: set[tuple[type, str]]) -> None:
    """Adds the keys of a suite file that a type and the types inside it declare."""
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


def test_nothing_exceeds_its_budget():
    check({folder: count_lines(folder) for folder in BUDGET["lines"]}, BUDGET["lines"])
    check({"acp_repro": count_lines("acp_repro", "*.py")}, BUDGET["commands"])
    check(count_surface(), BUDGET["surface"])
