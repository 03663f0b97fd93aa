"""Attention with a bias on its keys: Triton's kernels against float64, dropout included."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

kernels = pytest.importorskip("acp_repro.retention.key_bias_kernel", reason="pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# The interpreter does not support bfloat16 products.
BUDGET = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2} if DEVICE == "cuda" else {torch.float16: 2e-3}


def mixed(x):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x


def stays(seed, batch, heads, length, dropout):
    """The kernels' dropout, in integers of 64 bits."""
    head = torch.arange(batch * heads).view(batch, heads, 1, 1)
    at = torch.arange(length)
    row = mixed(mixed(seed + head) + at[:, None])
    return mixed(row ^ at * 0x9E3779B1 % 2**32) >= dropout * 2**32


def attention(query, key, value, bias, scale, kept=None, dropout=0.0):
    weights = (query @ key.transpose(-1, -2) * scale + bias[:, None, None]).softmax(-1)
    if kept is not None:
        weights = weights * kept / (1 - dropout)
    return (weights @ value).transpose(1, 2)


def inputs(batch, heads, length, width, dtype):
    """Queries, keys and values in a model's layout, heads inside tokens; one is padding."""
    x = [torch.randn(batch, length, heads, width, device=DEVICE).to(dtype).transpose(1, 2) for _ in range(3)]
    bias = -3 * torch.rand(batch, length, device=DEVICE)
    bias[-1, length // 2 + 1 :] = -1000.0
    return [t.requires_grad_() for t in (*x, bias)]


@pytest.mark.parametrize("shape", [(2, 3, 37, 16), (1, 2, 129, 32), (2, 1, 2, 64), (1, 1, 260, 16)])
@pytest.mark.parametrize(
    ("dropout", "splits"), [(0.0, 1), (0.1, 3), pytest.param(0.7, 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", BUDGET)
def test_output_and_gradients(shape, dropout, splits, dtype, poisoned, monkeypatch):
    monkeypatch.setattr(kernels, "_FULL", splits * shape[0] * shape[1])
    torch.manual_seed(sum(shape))
    given, scale = inputs(*shape, dtype), shape[-1] ** -0.5
    asked = torch.randn_like(given[0]).transpose(1, 2)
    state = torch.get_rng_state()
    found = kernels.attend(*given, dropout, scale)
    again = torch.autograd.grad(found, given, asked, retain_graph=True)
    found = found, *torch.autograd.grad(found, given, asked)
    assert all(torch.equal(a, b) for a, b in zip(again, found[1:], strict=True)), "bits repeat"
    same = torch.autograd.grad(kernels.attend(*given, dropout, scale).sum(), given)  # one number, expanded
    assert all(x.isfinite().all() for x in same)
    torch.set_rng_state(state)
    seed = int(torch.randint(2**31, ()))
    kept = stays(seed, *shape[:3], dropout).to(DEVICE) if dropout else None
    exact = [x.detach().double().requires_grad_() for x in given]
    right = attention(*exact, scale, kept, dropout)
    right = right, *torch.autograd.grad(right, exact, asked.double())
    for a, b in zip(found, right, strict=True):
        assert (a.double() - b).norm() <= BUDGET[dtype] * (b.norm() + 0.1 * b.numel() ** 0.5)


def test_token_stride_may_exceed_2_to_the_31():
    """As in a view of one tensor that holds queries, keys and values of a large batch, tokens first."""
    far = torch.empty(2**31 + 48, dtype=torch.float16, device=DEVICE)  # most of it is never accessed
    given = [far.as_strided((1, 1, 129, 16), (16, 16, 2**24, 1), n * 16) for n in range(3)]
    for x in given:
        x.copy_(torch.randn(x.shape))
    near = [x.clone(memory_format=torch.contiguous_format) for x in given]
    bias = -torch.rand(1, 129, device=DEVICE)
    results = []
    for query, key, value in (given, near):
        leaves = [x.detach().requires_grad_() for x in (query, key, value, bias)]
        out = kernels.attend(*leaves, 0.0, 0.25)
        results.append([out, *torch.autograd.grad(out, leaves, query.transpose(1, 2))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler: run make test on Linux")
def test_key_bias_kernels_compile_for_hopper():
    """The interpreter accepts code that the compiler rejects, so the kernels are compiled too."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "attention/compile_for_hopper.py"
    done = subprocess.run(
        [sys.executable, str(script), "--retention"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", done.stdout)]
    assert len(spilled) == 6 and max(spilled) <= 64, done.stdout  # backward is at the register limit
