"""Random calls against float64: random shapes, layouts, gates, thresholds and states of PyTorch.

`make test-gpu` runs as many cases as fit into its time limit; without a GPU, a few run on the CPU path and
fewer in Triton's interpreter. A failure prints its seed and the command that reproduces it. For a long run::

    ACP_FUZZ_SEED=1000 ACP_FUZZ_SECONDS=7200 python -m pytest tests/attention -k random_calls

Cases with seeds below 1,000 share a few compiled kernels; later ones have arbitrary widths and compile their
own kernels. Each element of a result has its own error budget; see :mod:`.budgets`.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import threading
import time

import pytest
import torch
from torch import func

from acp_repro.attention import forgetting_attention
from acp_repro.attention.backends import HAS_TRITON

from .budgets import NAMES, expected, judge, require
from .random_calls import BRAIN, DEVICE, IMPLEMENTATION, SINGLE, Call, Memory, draw_call, surroundings

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SEED, SECONDS = int(os.environ.get("ACP_FUZZ_SEED", 0)), os.environ.get("ACP_FUZZ_SECONDS")


def hunt(name, draw, check, seconds):
    """Generates and checks the case of each seed in turn, and reports all failures."""
    deadline = time.monotonic() + float(SECONDS or seconds)
    failures, worst = [], 0.0
    for seed in itertools.count(SEED):
        case = draw(seed)
        try:
            worst = max(worst, check(case))
        except Exception as error:
            failures.append((seed, case, error))
        broken = failures and re.search(r"CUDA error|Error \[CUDA\]", str(failures[-1][2]))  # as is the rest
        few = DEVICE == "cpu" and SECONDS is None and seed == SEED + 8
        if broken or few or time.monotonic() > deadline:
            break
    print(f"{name}: seeds {SEED} to {seed}, largest error {worst:.2f} of its budget")
    lines = [f"{len(failures)} of {seed + 1 - SEED} cases fail"]
    for seed, case, error in failures[:20]:
        lines += [f"{case}: {type(error).__name__}: {str(error)[:400]}"]
        lines += [f"    ACP_FUZZ_SEED={seed} ACP_FUZZ_SECONDS=0 python -m pytest tests/attention -k {name}"]
    if failures:
        raise AssertionError("\n".join(lines)) from failures[0][2]


# --- calling methods: each returns out, start_index and the gradients of q, k, v and log_fgate -------
def function_of(options):
    return functools.partial(
        forgetting_attention, return_start_index=True, implementation=IMPLEMENTATION, **options
    )


def plainly(given, options, attend=None):
    leaves = [x.detach().requires_grad_() for x in given[:4]]
    out, start = (attend or function_of(options))(*leaves)
    return out.detach(), start, *torch.autograd.grad(out, leaves, given[4])


def batched(given, options):
    """Two upstream gradients at once, the first of them 0."""
    leaves = [x.detach().requires_grad_() for x in given[:4]]
    out, start = function_of(options)(*leaves)
    douts = torch.stack([torch.zeros_like(given[4]), given[4]])
    grads = torch.autograd.grad(out, leaves, douts, is_grads_batched=True)
    require(not any(x[0].any() for x in grads), "a gradient of 0 has an effect")
    return out.detach(), start, *(x[1] for x in grads)


def mapped(given, options):
    """torch.func.vjp inside torch.func.vmap, over the call and one with q, v and dout of 0."""

    def one(*x):
        out, pull, start = func.vjp(function_of(options), *x[:4], has_aux=True)
        return out, start, *pull(x[4])

    pairs = [torch.stack([x if n in (1, 3) else torch.zeros_like(x), x]) for n, x in enumerate(given)]
    return tuple(x[1] for x in func.vmap(one)(*pairs))


def compiled(given, options):
    torch._dynamo.reset()
    given = [x.resolve_neg() for x in given]  # inductor drops the negative bit of arguments
    if isinstance(delta := options.get("adaptive_threshold"), torch.Tensor):
        options = options | {"adaptive_threshold": delta.resolve_neg()}
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    return plainly(given, options, torch.compile(function_of(options), fullgraph=True, backend=backend))


def captured(given, options):
    """A CUDA graph that was captured with other values of q."""
    static = [x.clone() for x in given]
    static[0].zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plainly(static, options)  # compiles, which cannot be captured in a graph
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = plainly(static, options)
    static[0].copy_(given[0])
    graph.replay()
    return tuple(x.clone() for x in results)


def in_threads(given, options):
    """Two concurrent threads, each with its own stream."""
    results, errors = [], []

    def work(stream):
        try:
            with torch.cuda.stream(stream):
                results.extend(plainly(given, options) for _ in range(5))
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    workers = [threading.Thread(target=work, args=(torch.cuda.Stream(),)) for _ in range(2)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    torch.cuda.synchronize()
    for error in errors:
        raise error
    require_same(results, "in another thread")
    return results[0]


LIGHT_WAYS = [plainly, batched, mapped] + ([captured, in_threads] if DEVICE == "cuda" else [])


def require_same(results, when):
    for other in results[1:]:
        for name, a, b in zip(("out", "start_index", *NAMES[1:]), other, results[0], strict=False):
            require(torch.equal(a, b), f"{name} has other bits {when}")


def check_call(call: Call, way=None) -> float:
    """The results of one way to call; plain calls run three times, because the third replays its launches."""
    layouts = call.rng.random()
    way = way or call.rng.choice([plainly, *LIGHT_WAYS])
    only_plainly = ("autocast", "anomaly")  # the first casts other operations too, the second synchronises
    call.words = [x for x in call.words if x not in only_plainly or way is plainly] + [way.__name__]
    results = []
    for _ in range(3 if way is plainly else 1):
        memory = Memory(random.Random(layouts), call.alignment)
        given, options = call.place(memory)
        with surroundings(call.words):
            results.append(way(given, options))
            if way is plainly:
                with torch.no_grad():
                    alone = function_of(options)(*given[:4])
                require_same([results[0], alone], "without gradients")
        memory.require_unchanged()
    require_same(results, "the next time")
    out, start, *grads = results[0]
    for name, x, like in zip(NAMES, (out, *grads), (given[0], *given[:4]), strict=True):
        require(x.dtype == like.dtype and x.shape == like.shape, f"{name}: its dtype or shape")
    if not options["head_first"]:
        out, *grads = (x.transpose(1, 2) for x in (out, *grads))
    return judge(dict(zip(NAMES, (out, *grads), strict=True)), call.right(start))


# --- tests ----------------------------------------------------------------------------------------------
def test_random_calls():
    hunt("random_calls", draw_call, check_call, seconds=90)


@pytest.mark.parametrize("seed", [12, 13])
@pytest.mark.parametrize(
    "way", [*LIGHT_WAYS[1:], pytest.param(compiled, marks=pytest.mark.slow)], ids=lambda way: way.__name__
)
def test_every_calling_method(way, seed):
    check_call(draw_call(seed, around=[]), way)


@pytest.mark.parametrize(
    "fixed",
    [
        {"gates": "closed"},
        {"gates": "open", "norm": "0", "threshold": "number"},
        {"gates": "at the floor", "threshold": "auto"},
        {"gates": "steep"},
        {"gates": "some closed", "norm": "300"},
        {"gates": "global", "norm": "300"},
        {"gates": "global", "norm": "one key above all", "threshold": None},
        {"gates": "open", "norm": "one key above all", "threshold": None, "window": 40},
        {"window": 10**12},
        {"dout": "pooled"},
        {"dout": "summed", "around": ["poison", "stream"]},
    ],
    ids=str,
)
def test_extreme_values(fixed):
    for family, length in ((0, 256), (3, 257), (6, 196)):
        check_call(draw_call(SEED + 4, family=family, length=length, packed=False, **fixed), plainly)


@pytest.mark.skipif(
    DEVICE == "cuda" or not HAS_TRITON,
    reason="tests Triton's interpreter: run CUDA_VISIBLE_DEVICES= make test",
)
@pytest.mark.parametrize(
    "fixed",
    [
        {"family": 3, "length": 65, "gates": "some closed", "norm": "one key above all"},
        {"family": 7, "length": 63, "gates": "steep", "threshold": "number"},
        {"family": 7, "length": 130, "packed": True, "threshold": "auto", "window": 33},
        {"family": 3, "length": 130, "threshold": "number", "window": 30},
        {"family": 10, "dtype": SINGLE, "length": 129},
    ],
    ids=str,
)
def test_kernels_in_the_interpreter(fixed, monkeypatch):
    monkeypatch.setattr("tests.attention.fuzz_on_gpu.IMPLEMENTATION", "triton")
    monkeypatch.setattr("tests.attention.random_calls.IMPLEMENTATION", "triton")
    check_call(draw_call(SEED + 2, around=["poison"], **fixed), batched)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU: run make test-gpu on a machine with one")
@pytest.mark.parametrize("order", [(2, 0, 1, 3), (0, 2, 1, 3), (0, 1, 2, 3)], ids=str)
def test_more_than_two_to_the_31_elements(order):
    """Sequence first, tokens are 17 million elements apart; otherwise the last heads start past 2**31."""
    if torch.cuda.get_device_properties(0).total_memory < 120e9:
        pytest.skip("needs a GPU with 120 GB of memory: run make test-gpu on an H200")
    shape = (2**14, 16, 132, 64)
    memory, back = [shape[axis] for axis in order], [order.index(axis) for axis in range(4)]
    q, k, v = (torch.randn(memory, dtype=BRAIN, device=DEVICE).permute(back) for _ in range(3))
    given = [q, k, v, -torch.rand(shape[:3], device=DEVICE), v]
    out, _, *grads = plainly(given, {"head_first": True})
    visible = torch.ones(1, 1, 132, 132, dtype=torch.bool, device=DEVICE)
    for b, h in [(0, 0), (2**13 - 1, 15), (2**13, 0), (11111, 7), (2**14 - 1, 15)]:
        one = [x[b : b + 1, h : h + 1] for x in (*given, out, *grads)]
        right = expected(*(x.double() for x in one[:4]), visible, 64**-0.5, BRAIN, one[4].double())
        judge(dict(zip(NAMES, one[5:], strict=True)), right)
    for x in (out, *grads):
        assert x.sum(dtype=SINGLE).isfinite()
    del q, k, v, given, out, grads, one, x
    torch.cuda.empty_cache()
