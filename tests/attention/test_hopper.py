"""The Hopper kernels: unsupported inputs, compiler warnings and results.

Triton's interpreter does not support these kernels, so :mod:`.gluon_on_cpu` emulates them without a GPU.
Triton includes a compiler for Hopper, which reports serialised products.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="pip install triton")

from triton.errors import TritonError

from acp_repro.attention import forgetting_attention
from acp_repro.attention.backends import find_backend
from acp_repro.attention.triton import dispatch, hopper, tiles

from .test_triton import (
    DEVICE,
    attend,
    boundary_for,
    check,
    make_inputs,
    packed_inputs,
    run,
    run_packed,
    single_key_inputs,
)

IS_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
ON_A_HOPPER = [pytest.mark.gpu] if IS_HOPPER else []
WIDTHS = pytest.mark.parametrize("head_dim", [64, 128])
needs_hopper = pytest.mark.skipif(
    not IS_HOPPER, reason="needs a Hopper GPU: run make test-gpu on an H100 or H200"
)


def test_portable_implementation_rejects_other_kernels_in_both_passes(monkeypatch):
    reasons = []

    def look(*inputs, **options):
        reasons.append(dispatch.why_portable(*inputs, **options))

    monkeypatch.setattr(dispatch, "find_hopper", look)
    q, k, v = torch.randn(3, 1, 1, 20, 16, device=DEVICE).requires_grad_()
    gates = -torch.rand(1, 1, 20, device=DEVICE)
    forgetting_attention(q, k, v, gates, head_first=True, implementation="triton-portable").sum().backward()
    assert reasons == ["implementation='triton-portable' was passed"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler: run make test on Linux")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kernels"), [("--narrow", 8), ("--wide", 12), ("--decode", 5 * (2 + 2 + 6)), ("--training", 6)]
)
def test_hopper_kernels_compile_without_spills_or_serialised_products(what, kernels):
    """ptxas warns if it serialises products, which removes the advantage of the Hopper kernels.

    A multiprocessor has 228 KB of shared memory and reserves 1 KB per program. Two programs of the backward
    must fit, and one of the forward, which serves wide heads only.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py")), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines, hopper_kernels = done.stdout.splitlines(), what in ("--narrow", "--wide")
    lines = [line for line in lines if line.startswith("hopper.") or not hopper_kernels]
    assert len(lines) == kernels, done.stdout
    assert all("0 bytes spill stores" in line for line in lines), done.stdout
    for line in lines if hopper_kernels else ():
        assert "serialized" not in line
        assert int(line.rpartition(" ")[2]) <= (227 if "forward" in line else 113) * 1024, done.stdout


def test_unsupported_triton_falls_back_with_a_reason(monkeypatch):
    inputs = make_inputs(64, 64, 16, torch.float32)
    grid = (None, None, 0.25, 64, 64)
    expected = run(inputs, *grid)
    calls = []

    def refuse(*given):
        calls.append(given)
        raise TritonError("no such builtin")

    monkeypatch.setattr(dispatch, "_refused", {})
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "find_hopper", lambda *_, **options: SimpleNamespace(launch_backward=refuse))
        with pytest.warns(UserWarning, match="no such builtin; the slower portable kernels run instead"):
            actual = run(inputs, *grid)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)) and calls
    assert "no such builtin" in dispatch.why_portable(*inputs[1:4], 64, 64)
    others = make_inputs(64, 64, 32, torch.float32)[1:4]  # supported by other kernels
    assert "no such builtin" not in dispatch.why_portable(*others, 64, 64)


@pytest.mark.skipif(DEVICE == "cuda", reason="tests the interpreter: run CUDA_VISIBLE_DEVICES= make test")
@pytest.mark.parametrize(
    ("seqlen", "kind", "dtype", "head_dim"),
    [
        (3, "exact", torch.bfloat16, 64),
        (130, "shared", torch.float16, 64),
        (389, "pruned", torch.bfloat16, 64),
        (1, "exact", torch.bfloat16, 128),
        (65, "shared", torch.bfloat16, 128),
        (600, "padded", torch.bfloat16, 128),
        pytest.param(600, "pruned", torch.float16, 128, marks=pytest.mark.slow),
        (600, "huge", torch.bfloat16, 128),
    ],
)
def test_every_output_and_gradient_without_a_gpu(monkeypatch, seqlen, kind, dtype, head_dim):
    """389 and 600 positions have more tiles than there are stages. Padding contains NaN."""
    from . import gluon_on_cpu

    monkeypatch.setattr(hopper, "launch", gluon_on_cpu.launch)
    monkeypatch.setattr(dispatch, "find_hopper", lambda *_, **options: hopper)
    monkeypatch.setattr(dispatch, "tiles_for", lambda *_: tiles._LARGE[128])
    scale = 0.5 if kind == "huge" else 0.125  # the first scale keeps scores below the level
    inputs, grid = make_inputs(seqlen, seqlen, head_dim, dtype, batch=1 + (kind == "padded")), (128, 64)
    if kind == "huge":  # a key that two rows score far above their own
        inputs[1][:, :, 400:402] = 30
        inputs[2][:, :, 300] = 30
    if kind == "shared":
        inputs[2:4] = (x[:, :1].expand(-1, 2, -1, -1) for x in inputs[2:4])
    seq_start = torch.tensor([0, seqlen // 2 + 1]) if kind == "padded" else None
    boundary = boundary_for(inputs[4], seqlen, *grid, seq_start)
    if kind in ("exact", "huge"):
        boundary.zero_()
    dout, q, k, v, c = inputs
    if kind == "shared":
        k, v = k[:, :1], v[:, :1]
    given = (None if kind == "exact" else boundary, seq_start, scale, *grid)
    out, *_, lse = attend(inputs, boundary, seq_start, scale, *grid)
    out = out.to(dtype)
    if head_dim == 128:
        poisoned = [k.clone(), v.clone()]
        if kind == "padded":
            for x in poisoned:
                x[1, :, : (seqlen // 2 + 1) // 64 * 64] = float("nan")
        out, level = dispatch.forward(q, *poisoned, c, *given)
        lse = level.double() * math.log(2)
    grads = [torch.full(q.shape, float("nan"), dtype=dtype) for _ in "qkv"]
    dc = torch.full(c.shape, float("nan"))
    hopper.launch_backward(dout, q, k, v, out, (lse / math.log(2)).float(), c, *given, *grads, dc)
    check(inputs, boundary, seq_start, scale, *grid, actual=(out, *grads, dc, lse))


@pytest.mark.parametrize("padded", [pytest.param(x, marks=ON_A_HOPPER) for x in (False, True)])
@WIDTHS
def test_packed_keys(monkeypatch, head_dim, padded):
    """More keys than queries, in one matrix for all rows; a head does not read all keys of its row."""
    if not IS_HOPPER:
        from . import gluon_on_cpu

        monkeypatch.setattr(hopper, "launch", gluon_on_cpu.launch)
        monkeypatch.setattr(dispatch, "find_hopper", lambda *_, **options: hopper)
        monkeypatch.setattr(dispatch, "tiles_for", lambda *_: tiles._LARGE[128])
    inputs = packed_inputs(256, 640, head_dim, torch.bfloat16)
    seq_start = torch.tensor([400, 470], device=DEVICE) if padded else None
    # With this delta, weights of skipped keys are large enough to see.
    grid = (boundary_for(inputs[4], 256, 128, 64, delta=-2.0), seq_start, 0.125, 128, 64)
    check(inputs, *grid, actual=run_packed(inputs, *grid))


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [4, 63, 64, 68, 129, 192, 999, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["pruned", "exact", "padded"])
@WIDTHS
def test_every_output_and_gradient(monkeypatch, poisoned, seqlen, dtype, kind, head_dim):
    inputs = make_inputs(seqlen, seqlen, head_dim, dtype)
    grid = find_backend("triton").block_sizes(head_dim, dtype)
    assert dispatch.find_hopper(*inputs[1:4], *grid, inputs[0]) is hopper
    seq_start = torch.tensor([0, seqlen // 2 + 1], device=DEVICE) if kind == "padded" else None
    boundary = boundary_for(inputs[4], seqlen, *grid, seq_start)
    if kind == "exact":
        boundary.zero_()
    actual = run(inputs, boundary, seq_start, 0.125, *grid)
    check(inputs, boundary, seq_start, 0.125, *grid, actual=actual)
    again = run(inputs, boundary, seq_start, 0.125, *grid)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    monkeypatch.setenv("ACP_REPRO_PORTABLE", "1")
    assert dispatch.find_hopper(*inputs[1:4], *grid, inputs[0]) is None
    portable = run(inputs, boundary, seq_start, 0.125, *grid)
    check(inputs, boundary, seq_start, 0.125, *grid, actual=portable)


@needs_hopper
@pytest.mark.gpu
@WIDTHS
def test_weight_of_1_is_exact_in_both_passes(head_dim):
    inputs = single_key_inputs(131, head_dim, torch.float16)
    assert dispatch.find_hopper(*inputs[1:4], 128, 64, inputs[0]) is hopper
    boundary = torch.zeros(2, 2, 2, dtype=torch.int32, device=DEVICE)
    out, _, _, dv, *_ = run(inputs, boundary, None, 0.11, 128, 64)
    assert torch.equal(out, inputs[3]) and torch.equal(dv, inputs[0])


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 14])  # 14: a complete group of heads and a partial one
@pytest.mark.parametrize("grid", [(128, 64), (64, 128), (192, 64), (128, 128)])
@WIDTHS
def test_every_launch_grid(heads, grid, head_dim):
    inputs = make_inputs(1000, 1000, head_dim, torch.bfloat16, heads=heads, batch=1)
    boundary = boundary_for(inputs[4], 1000, *grid)
    actual = run(inputs, boundary, None, 0.125, *grid)
    check(inputs, boundary, None, 0.125, *grid, actual=actual)


@needs_hopper
@pytest.mark.gpu
@WIDTHS
def test_more_block_rows_than_one_read(head_dim):
    inputs = make_inputs(40_000, 40_000, head_dim, torch.bfloat16, batch=1)
    boundary = boundary_for(inputs[4], 40_000, 128, 64)
    check(inputs, boundary, None, 0.125, 128, 64)
