"""The wheel, installed elsewhere: what other projects import needs torch and NumPy, nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = "scipy pandas yaml pydantic tqdm safetensors matplotlib seaborn markdown_it tokenizers rich"

pytestmark = pytest.mark.slow


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the sources alone, so that nothing is taken that only this checkout has."""
    pytest.importorskip("setuptools", "77", reason="building a wheel: pip install 'setuptools>=77'")
    folder = tmp_path_factory.mktemp("beside") / "acp_repro"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def site(clone, tmp_path_factory):
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(clone)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"acp_repro"}
    return folder / "site"


def run(site: Path, code: str, blocked: str = EXTRAS) -> str:
    path = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    block = f"{path}for n in {blocked.split()!r}: sys.modules[n] = None\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", block + code], cwd=site, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_methods_need_torch_and_numpy_alone(site):
    code = """
import acp_repro
assert "torch" not in sys.modules and acp_repro.__file__.startswith(sys.path[0])
from acp_repro import BPETokenizer, ByteTokenizer, FoXConfig, FoXForCausalLM, forgetting_attention
try:
    BPETokenizer("{}")
except ImportError as error:
    assert "pip install tokenizers" in str(error)
assert ByteTokenizer().prompt("a") == [256, 97]
import torch
q = torch.randn(1, 70, 2, 16)
assert forgetting_attention(q, q, q, -torch.rand(1, 70, 2), adaptive_threshold="auto").shape == q.shape
shape = dict(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_heads=2)
print(FoXForCausalLM(FoXConfig.pro(**shape))(torch.zeros(1, 9, dtype=torch.long)).shape[-1])
"""
    assert run(site, code).strip() == "20"


def test_files_that_the_package_reads_come_along(site):
    code = """
from acp_repro.pipeline.data import sample_text
from acp_repro.explorer.pack import render
print(len(sample_text()), len(render("heads", {}, {})))
"""
    text, page = map(int, run(site, code, blocked="").split())
    assert text > 100_000 and page > 300_000  # D3 alone has 280 kB
