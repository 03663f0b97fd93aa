"""The attention folder as a kernel for Hugging Face's ``kernels``, without the package acp_repro."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "acp_repro/attention"
# The loader's steps for a local path without build variants: kernels/src/kernels/importer.py.
LOADER = """
import importlib.util, json, sys
from pathlib import Path
metadata = json.loads(Path("kernel/metadata.json").read_text())
spec = importlib.util.spec_from_file_location(metadata["id"], "kernel/__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[metadata["id"]] = kernel
spec.loader.exec_module(kernel)
"""
PACKAGE = """
import sys
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path("kernel"))
"""
CALL = """
import torch
q = torch.randn(1, 300, 2, 16, requires_grad=True)
gates = -torch.rand(1, 300, 2)
found = []
for name in ("blockwise", "reference"):
    out = kernel.forgetting_attention(q, q, q, gates, log_pruning_tolerance=-10.0, implementation=name)
    found.append(torch.cat((out, *torch.autograd.grad(out.square().sum(), q))))
torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
assert not any(name.partition(".")[0] == "acp_repro" for name in sys.modules), "it imports the package"
"""


@pytest.mark.parametrize("loader", [LOADER, PACKAGE], ids=["steps", "kernels"])
def test_kernel_folder_works_standalone(tmp_path, loader):
    if loader == PACKAGE:
        pytest.importorskip("kernels", reason="pip install kernels")
    shutil.copytree(FOLDER, tmp_path / "kernel", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-E", "-c", loader + CALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
