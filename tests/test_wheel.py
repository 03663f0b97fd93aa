"""The wheel, installed elsewhere: what other projects import needs torch and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = "numpy pandas yaml pydantic tqdm safetensors zstandard matplotlib seaborn jinja2 tokenizers rich"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that holds the installed wheel and nothing else."""
    pytest.importorskip("setuptools", "77", reason="building a wheel: pip install 'setuptools>=77'")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # From a copy of the sources alone, so that nothing is taken that only this checkout has.
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "clone")]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("analysis", "tests"))]
    return folder / "site"


def run(site: Path, code: str, blocked: str = EXTRAS) -> str:
    path = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    block = f"{path}for n in {blocked.split()!r}: sys.modules[n] = None\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", block + code], cwd=site, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_methods_need_torch_alone(site):
    code = """
import acp_repro
assert "torch" not in sys.modules and acp_repro.__file__.startswith(sys.path[0])
from acp_repro import FoXConfig, FoXForCausalLM, forgetting_attention
import torch
q = torch.randn(1, 70, 2, 16)
assert forgetting_attention(q, q, q, -torch.rand(1, 70, 2), adaptive_threshold="auto").shape == q.shape
shape = dict(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_heads=2)
print(FoXForCausalLM(FoXConfig.pro(**shape))(torch.zeros(1, 9, dtype=torch.long)).shape[-1])
"""
    assert run(site, code).strip() == "20"


def test_what_an_extra_brings_is_named_where_it_is_missing(site):
    code = """
from acp_repro import train, load_pretrained
assert train.main(["--suite", "x.yaml"]) == 2
open("x.yaml", "w").write("description: x")
assert train.main(["--suite", "x.yaml"]) == 2
"""
    block = f"import sys; sys.path.insert(0, {str(site)!r}); sys.modules['yaml'] = None\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", block + code], cwd=site, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'acp_repro[chain]'" in done.stderr


def test_the_sample_text_comes_along(site):
    code = "from acp_repro.data import sample_text; print(len(sample_text()))"
    assert int(run(site, code, blocked="")) > 100_000
