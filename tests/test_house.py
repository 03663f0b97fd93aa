"""The one-way flow of the house: who imports whom, and what needs neither torch nor triton."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each part may import from these parts of ours and from no other.
ALLOWED = {
    "acp_repro.attention": {"acp_repro.attention"},
    "acp_repro.model": {"acp_repro.model", "acp_repro.attention"},
    "acp_repro.data": {"acp_repro.data"},
    "acp_repro.chain.strict_yaml": set(),
    "acp_repro.settings": set(),
    "acp_repro.suite": {
        "acp_repro.settings",
        "acp_repro.chain.strict_yaml",
        "acp_repro.data",
        "acp_repro.model",
    },
    "acp_repro.records": {"acp_repro.suite"},
    "acp_repro.chain.state": {"acp_repro.records", "acp_repro.suite"},
    "acp_repro.training": {
        "acp_repro.training",
        "acp_repro.model",
        "acp_repro.attention",
        "acp_repro.data",
        "acp_repro.suite",
        "acp_repro.records",
    },
    "acp_repro.measure": {
        "acp_repro.measure",
        "acp_repro.training",
        "acp_repro.model",
        "acp_repro.attention",
        "acp_repro.data",
        "acp_repro.suite",
        "acp_repro.records",
        "acp_repro.chain.state",
    },
    "analysis": {"analysis", "acp_repro.records", "acp_repro.suite"},
}


ANALYSIS = sorted((ROOT / "analysis").glob("[a-z]*.py"))


def part_of(module: str) -> str:
    return ".".join(module.split(".")[: 1 if module.startswith("analysis") else 2])


def imported_modules(path: Path) -> set[str]:
    """Absolute names of our own modules that ``path`` imports, wherever in the file."""
    package = list(path.relative_to(ROOT).with_suffix("").parts)[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names.update(
                [f"{stem}.{alias.name}" for alias in node.names]
                if not node.module or stem in ("acp_repro", "analysis")
                else [stem]
            )
    return {name for name in names if name.split(".")[0] in ("acp_repro", "analysis")}


def test_imports_follow_the_arrows():
    wrong = []
    for part, allowed in ALLOWED.items():
        where = ROOT / part.replace(".", "/")
        for path in [*where.rglob("*.py"), *where.parent.glob(f"{where.name}.py")]:
            for name in imported_modules(path):
                if name != "acp_repro" and part_of(name) not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_implementations_do_not_import_each_other():
    names = {"reference", "blockwise", "triton"}
    for name in names:
        where = ROOT / "acp_repro" / "attention" / name
        for path in [*where.rglob("*.py"), *where.parent.glob(f"{name}.py")]:
            for imported in imported_modules(path):
                other = imported.removeprefix("acp_repro.attention.").split(".")[0]
                assert other not in names - {name}, f"{path} imports {imported}"


@pytest.mark.parametrize(
    ("forbidden", "statement"),
    [
        (("torch", "triton"), "; ".join(f"import analysis.{p.stem}" for p in ANALYSIS)),
        (("torch",), "import acp_repro, acp_repro.suite, acp_repro.records"),
        (
            ("triton",),
            "from acp_repro.attention import forgetting_attention as f; import torch;"
            "f(*(torch.zeros(1, 4, 1, 16),) * 3, torch.zeros(1, 4, 1))",
        ),
    ],
)
def test_light_parts_import_no_heavy_library(forbidden, statement):
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in forbidden)
    subprocess.run([sys.executable, "-c", block + statement], check=True, cwd=ROOT)
