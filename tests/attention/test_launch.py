"""Replayed launches are bitwise identical to Triton's own; without a GPU, in Triton's interpreter."""

import ctypes
import functools
import threading

import pytest
import torch

pytest.importorskip("triton", reason="pip install triton")

from torch.utils._python_dispatch import _disable_current_modes

from acp_repro import attention
from acp_repro.attention import checks, forgetting_attention
from acp_repro.attention import triton as kernels
from acp_repro.attention.triton import dispatch, launch, norms
from acp_repro.model import blocks, step_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.gpu


def run_interpreted(kernel, _, grid, arguments, constants):
    """Replaces Triton's launcher by the interpreter, called with addresses like the launcher in C."""
    layouts = [(x.dtype, x.untyped_storage().nbytes()) if hasattr(x, "dtype") else None for x in arguments]

    def at(address, layout):
        if layout is None:
            return address
        return torch.frombuffer((ctypes.c_char * layout[1]).from_address(address), dtype=layout[0])

    def run(stream, *given):
        with _disable_current_modes():
            kernel[grid](*map(at, given, layouts), **constants)

    return run, [launch._STREAM, *arguments]


@pytest.fixture
def repeated(monkeypatch):
    """Clears all recorded launches, and returns a list that grows by one with each replayed pass."""
    count, run = [], launch.Plan.__call__
    monkeypatch.setattr(launch.Plan, "__call__", lambda *given: (count.append(1), run(*given))[1])
    for call in (kernels.forward_pass, dispatch._backward, norms._find_threshold, attention._kept_ready()):
        call.plans.clear()
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        interpret = InterpretedFunction.run

        def unseen(self, *arguments, **options):
            with _disable_current_modes():  # on a GPU, launches call no PyTorch operator
                return interpret(self, *arguments, **options)

        monkeypatch.setattr(InterpretedFunction, "run", unseen)
        monkeypatch.setattr(launch, "bind_arguments", run_interpreted)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
        monkeypatch.setattr(launch, "can_repeat", lambda x: not torch._C._len_torch_dispatch_stack())
    return count


def inputs(length, heads, keys=None, kv_heads=None, head_dim=16, dtype=torch.float32, offset=0, seed=0):
    """q, k, v, log_fgate, dout, head-first; ``offset`` elements after an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    keys, kv_heads = keys or length, kv_heads or heads

    def draw(heads, length):
        x = torch.randn((2, length, heads, head_dim), generator=generator).to(DEVICE, dtype)
        memory = torch.empty(x.numel() + 64, dtype=x.dtype, device=DEVICE)
        return memory[offset : offset + x.numel()].view(x.shape).copy_(x).transpose(1, 2)

    gates = -torch.rand(2, heads, keys, generator=generator).to(DEVICE)
    return draw(heads, length), draw(kv_heads, keys), draw(kv_heads, keys), gates, draw(heads, length)


def both(given, **options):
    *tensors, dout = given
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = forgetting_attention(*leaves, head_first=True, implementation="triton", **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def by_triton(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "can_repeat", lambda x: False)
        return call()


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


HALF = {"dtype": torch.bfloat16, "length": 512, "heads": 4, "head_dim": 64}
CASES = [({"heads": 1, "length": 5, "keys": 17}, -2.0)]  # on a GPU, random calls repeat each plain call
CASES += [pytest.param({**HALF, "length": 513, "offset": 1}, "auto", marks=gpu)]


@pytest.mark.parametrize(("shape", "threshold"), CASES)
def test_cached_launches_are_bitwise_identical_to_triton_launches(repeated, shape, threshold):
    """With new addresses and values, and with one tensor passed twice."""
    problems = [inputs(seed=seed, **shape) for seed in range(3)]
    q, k, _, gates, dout = problems[2]
    for n, given in enumerate([*problems, (q, k, k, gates, dout)]):
        actual = both(given, adaptive_threshold=threshold)
        if n >= 2:
            assert_equal(actual, by_triton(lambda given=given: both(given, adaptive_threshold=threshold)))
    assert len(repeated) == 2 * (3 if threshold == "auto" else 2)


def test_inference_calls_are_replayed_and_still_validated(repeated, monkeypatch):
    monkeypatch.setattr(checks, "reads_values", lambda x: False)  # as on a GPU
    call = functools.partial(forgetting_attention, implementation="triton", return_start_index=True)
    for seed in range(3):
        given = [x.transpose(1, 2) for x in inputs(heads=1, length=5, keys=17, seed=seed)[:4]]
        found = call(*given, adaptive_threshold=-2.0)
    assert len(repeated) == 1
    assert_equal(found, by_triton(lambda: call(*given, adaptive_threshold=-2.0)))
    for wrong in ({"adaptive_threshold": 2.0}, {"window_size": True}, {"log_fgate": given[3][:, 1:]}):
        with pytest.raises((TypeError, ValueError)):
            call(**{**dict(zip(("q", "k", "v", "log_fgate"), given, strict=True)), **wrong})


@torch.no_grad()
def test_small_launches_of_a_model_are_replayed(repeated, monkeypatch):
    """Additions with their norm, in one and in two dtypes, and writes of first tokens to several pools."""
    monkeypatch.setattr(blocks, "_has_kernels", lambda x: True)
    k, v, gates = (x.contiguous() for x in inputs(70, 3)[1:4])
    table = torch.arange(1, 13, dtype=torch.int32, device=DEVICE).view(2, 3, 2)
    start = torch.zeros((2, 2, 3), dtype=torch.int32, device=DEVICE)

    def run(scale):
        weight, changes = torch.ones(16, device=DEVICE), (k, k.bfloat16())
        found = [x for change in changes for x in step_kernels.add_and_norm(scale * v, change, weight, 1e-6)]
        pools = [blocks.BlockPool(k, table.clone(), 12 + n, start) for n in range(2)]
        tokens = [(pool, scale * k, n + v, gates, scale * gates.double()) for n, pool in enumerate(pools)]
        blocks.write_pools(torch.tensor([70, 40], dtype=torch.int32, device=DEVICE), tokens)
        held = [x[table.long()].flatten(2, 3) for pool in pools for x in (pool.k, pool.v, pool.c[:, 0])]
        return found + [x[:, :, :40] for x in held]

    run(1), run(2)
    found = run(3)
    assert_equal(found, by_triton(lambda: run(3)))
    assert torch.equal(found[-2][0], 1 + v[0, :, :40]) and len(repeated) == 3


@gpu
def test_threads_streams_and_graphs(repeated):
    problems = [inputs(seed=seed, **{**HALF, "length": length}) for seed in (0, 1) for length in (512, 513)]
    expected = by_triton(lambda: [both(given, adaptive_threshold=-9.0) for given in problems])
    torch.cuda.synchronize()
    wrong = []

    def work(n):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10_000_000)
            for _ in range(20):
                actual = both(problems[n], adaptive_threshold=-9.0)
                wrong.extend(n for a, b in zip(actual, expected[n], strict=True) if not torch.equal(a, b))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not wrong and len(repeated) > 2 * 15 * 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(problems[0], adaptive_threshold=-9.0)
    for x, y in zip(problems[0], problems[2], strict=True):
        x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(captured, expected[2])
