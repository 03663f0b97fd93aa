"""The wheel, installed elsewhere: its library modules need only torch and NumPy."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import SHIPPED
from tests.test_docs import python_that_runs

ROOT = Path(__file__).parent.parent
EXTRAS = "scipy pandas yaml pydantic tqdm safetensors matplotlib seaborn tokenizers"

pytestmark = pytest.mark.slow
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the sources only, so that no untracked file of this checkout is used."""
    pytest.importorskip("setuptools", "77", reason="building a wheel: pip install 'setuptools>=77'")
    folder = tmp_path_factory.mktemp("beside") / "acp_repro"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def python(clone, tmp_path_factory):
    """The interpreter of an environment with the wheel; a .pth adds the installed packages."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(clone)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"acp_repro"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    (site / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return python


def run(python: Path, *arguments: str) -> str:
    command = [str(python), "-I", *arguments]  # the working folder is not on its path
    return subprocess.run(command, cwd=python.parent, capture_output=True, text=True, check=True).stdout


def test_readme_and_commands_work_outside_the_repository(python):
    code = """
from acp_repro.pipeline.data import sample_text
from acp_repro.explorer.pack import render
print(len(sample_text()), len(render("heads", {}, {})))
"""
    text, page = map(int, run(python, "-c", code).split())
    assert text > 100_000 and page > 300_000  # package data files; D3 has 280 kB
    run(python, "-c", python_that_runs((ROOT / "README.md").read_text(encoding="utf-8")))
    model = str(SHIPPED)
    assert "local" in run(
        python, "-m", "acp_repro.inspect", model, "--context-length", "512", "--tokens", "512"
    )
    assert run(python, "-m", "acp_repro.generate", model, "--prompt", "It was", "--max-new-tokens", "5")


def test_methods_require_only_torch_and_numpy(python):
    code = f"""
import sys
for name in {EXTRAS.split()}: sys.modules[name] = None
import acp_repro
assert "torch" not in sys.modules and acp_repro.__file__.startswith(sys.prefix)
from acp_repro import BPETokenizer, ByteTokenizer, FoXConfig, FoXForCausalLM, forgetting_attention
try:
    BPETokenizer("{{}}")
except ImportError as error:
    assert "pip install tokenizers" in str(error)
assert ByteTokenizer().prompt("a") == [256, 97]
import torch
q = torch.randn(1, 70, 2, 16)
assert forgetting_attention(q, q, q, -torch.rand(1, 70, 2), adaptive_threshold="auto").shape == q.shape
shape = dict(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_heads=2)
print(FoXForCausalLM(FoXConfig.pro(**shape))(torch.zeros(1, 9, dtype=torch.long)).shape[-1])
"""
    assert run(python, "-c", code).strip() == "20"
