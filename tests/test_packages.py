"""The import contracts of pyproject.toml, and modules that need no torch or Triton."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import acp_repro.common
import acp_repro.pipeline
import analysis

ROOT = Path(__file__).parent.parent
LIGHT = [
    name
    for package in (analysis, acp_repro.common, acp_repro.pipeline)
    for _, name, is_package in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    if not (is_package and package is acp_repro.pipeline)
]


def test_imports_follow_the_layers():
    pytest.importorskip("importlinter", reason="pip install -e '.[test]'")
    linter = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
    ]
    done = subprocess.run(linter, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_attention_package_is_relocatable():
    """The rules of Hugging Face's `kernels`: relative imports, torch, Triton and the standard library."""
    folder, allowed = ROOT / "acp_repro" / "attention", {"torch", "triton", *sys.stdlib_module_names}
    paths = list(folder.rglob("*.py"))
    assert len(paths) > 20
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= len(path.relative_to(folder).parts), (path, node.lineno)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or alias.name for alias in node.names]
                assert {name.partition(".")[0] for name in names} <= allowed, (path, node.lineno)


@pytest.mark.parametrize(
    ("forbidden", "statement"),
    [
        (("torch", "triton"), "; ".join(f"import {name}" for name in [*LIGHT, "acp_repro.papers.acp.cost"])),
        (
            ("torch", "triton", "matplotlib", "seaborn"),
            "from acp_repro.pipeline import paper_registry;"
            "papers = [paper_registry.find_paper(n) for n in paper_registry.paper_names()];"
            "[(p.metrics, p.items, p.claims) for p in papers]",
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
def test_light_modules_import_no_heavy_library(forbidden, statement):
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
