"""Packages import in one direction: which may import which, no circles, and what needs no torch or triton."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each package may import from these packages of ours, from itself, and from no other.
COMMON, CHAIN = "acp_repro.common", "acp_repro.chain"
METHODS = {"acp_repro.attention", "acp_repro.model"}
RETENTION = "acp_repro.retention"
LAP = "acp_repro.lap"
ALLOWED = {
    COMMON: set(),
    "acp_repro.attention": {COMMON},
    "acp_repro.model": {COMMON, "acp_repro.attention"},
    "acp_repro.hf": {COMMON, *METHODS},
    RETENTION: {COMMON},
    LAP: {COMMON},
    "acp_repro.data": {COMMON},
    "acp_repro.heads": {COMMON, *METHODS, "acp_repro.papers.acp"},  # a look at what the paper measures
    CHAIN: {COMMON},  # the registry imports a paper, and a paper its figures, by name alone
    "acp_repro.benchmark": {COMMON, *METHODS},
    "acp_repro.training": {COMMON, CHAIN},
    "acp_repro.papers": set(),
    "acp_repro.papers.acp": {
        COMMON,
        CHAIN,
        "acp_repro.training",
        "acp_repro.benchmark",
        "acp_repro.data",
        "acp_repro.hf",  # what the LM Evaluation Harness reads
        *METHODS,
    },
    "acp_repro.papers.retention": {
        COMMON,
        CHAIN,
        "acp_repro.training",
        "acp_repro.benchmark",  # its timer
        "acp_repro.data",
        RETENTION,
    },
    "acp_repro.papers.lap": {
        COMMON,
        CHAIN,
        "acp_repro.training",
        "acp_repro.benchmark",
        "acp_repro.data",
        LAP,
    },
    # analysis never needs torch: of a paper it reads what stands in modules that need nothing.
    "analysis": {COMMON, CHAIN},
    "analysis.report": {COMMON, CHAIN, "analysis"},
    "analysis.reproduction": {COMMON, CHAIN, "analysis", "analysis.report"},
    "analysis.acp": {COMMON, CHAIN, "analysis", "acp_repro.papers.acp"},
    "analysis.retention": {COMMON, CHAIN, "analysis", "acp_repro.papers.retention"},
    "analysis.lap": {COMMON, CHAIN, "analysis", "acp_repro.papers.lap"},
}
TORCH_FREE = ("analysis", "acp_repro.chain", "acp_repro.common", "acp_repro.papers.acp.cost")
COMMANDS = {path.stem for path in (ROOT / "acp_repro").glob("*.py")} - {"__init__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for top in ("acp_repro", "analysis") for path in (ROOT / top).rglob("*.py")
}


def package_of(module: str) -> str:
    """The longest name in ALLOWED that the module lies in; a command is a package of its own."""
    packages = [package for package in ALLOWED if module == package or module.startswith(f"{package}.")]
    return max(packages, key=len, default=module)


def imported(path: Path) -> set[str]:
    """Our own modules that ``path`` imports, wherever in the file, for types too."""
    package = list(path.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` means the module, `from module import name` the module too.
            names.update(f"{stem}.{a.name}" if f"{stem}.{a.name}" in MODULES else stem for a in node.names)
    return {name for name in names if name in MODULES and MODULES[name] != path}


GRAPH = {name: imported(path) for name, path in MODULES.items()}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = set()
            while node not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_circle_of_modules_or_of_packages():
    assert circles(GRAPH) == []
    packages = {}
    for name, others in GRAPH.items():
        here = packages.setdefault(package_of(name), set())
        here |= {package_of(other) for other in others} - {package_of(name)}
    assert circles(packages) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_packages_import_only_what_is_allowed():
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        if (package := package_of(name)) in ALLOWED
        for other in others
        if package_of(other) != package and package_of(other) not in ALLOWED[package]
    ]
    assert not wrong
    # Nothing but tests, scripts and other commands' processes needs a command.
    names = {f"acp_repro.{name}" for name in COMMANDS}
    assert not [(name, others & names) for name, others in GRAPH.items() if others & names]


def test_only_commands_stand_at_the_top():
    for name in COMMANDS:
        text = (ROOT / "acp_repro" / f"{name}.py").read_text()
        assert f"python -m acp_repro.{name}" in text and "run_command(main)" in text, name


def test_implementations_do_not_import_each_other():
    names = {f"acp_repro.attention.{name}" for name in ("reference", "blockwise", "triton")}
    for module, others in GRAPH.items():
        own = {name for name in names if module == name or module.startswith(f"{name}.")}
        if own:
            found = {n for n in names for other in others if other == n or other.startswith(f"{n}.")}
            assert found <= own, module


def test_no_file_name_stands_three_times():
    names = Counter(
        path.stem.removesuffix("_folder")
        for path in MODULES.values()
        if not path.stem.startswith("__") and not {"papers", "analysis", "retention", "lap"} & {*path.parts}
    )
    assert not [name for name, count in names.items() if count > 2 and name != "table"]


def test_only_the_records_module_reads_records():
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if name != "acp_repro.chain.records" and not name.startswith(("acp_repro.data", "analysis")):
            assert not re.search(r"read_csv|csv\.(DictReader|reader)\(", text), name


def test_files_are_written_whole_or_not_at_all():
    """By `common.files`, but for what lies in a folder or under a name that is temporary itself."""
    in_place = re.compile(r"\.open\(\"w|(?<!files)\.write_(text|bytes)\(|\.to_csv\((?!index)")
    temporary = {
        "acp_repro.common.files",
        "acp_repro.hf.conversion",
        "acp_repro.model.pretrained",
        "acp_repro.papers.acp.evaluation.tasks",
        "acp_repro.training.checkpoint",
    }
    found = {name for name, path in MODULES.items() if in_place.search(path.read_text(encoding="utf-8"))}
    assert found == temporary


@pytest.mark.parametrize(
    ("forbidden", "statement"),
    [
        (
            ("torch", "triton"),
            "; ".join(
                f"import {name}"
                for name in sorted(MODULES)
                if name.startswith(TORCH_FREE) and not name.endswith("__main__")
            ),
        ),
        (
            ("torch", "triton", "matplotlib", "seaborn", "scipy"),
            "from acp_repro.chain import registry;"
            "papers = [registry.find_paper(n) for n in registry.paper_names()];"
            "[(p.quantities, p.items, p.claims) for p in papers]",
        ),
        (
            ("torch",),
            "import acp_repro, acp_repro.train, acp_repro.measure, acp_repro.plan, acp_repro.inspect",
        ),
        (  # at every call of make
            (),
            "from acp_repro import make; make.main(['all', 'reproduction', '--suite', 'h100', '--dry-run']);"
            "assert 'torch' not in sys.modules",
        ),
    ],
)
def test_light_parts_import_no_heavy_library(forbidden, statement):
    # torch is absent, not None: scipy takes None in sys.modules for the library itself.
    block = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
    )
    block += "".join(
        "sys.meta_path.insert(0, NoTorch())\n" if name == "torch" else f"sys.modules[{name!r}] = None\n"
        for name in forbidden
    )
    subprocess.run([sys.executable, "-c", block + statement], check=True, cwd=ROOT)
