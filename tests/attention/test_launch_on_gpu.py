"""On a GPU: ready launches give the bits of Triton's own, in graphs, threads, streams and compiled code."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton", reason="pip install triton")

from acp_repro.attention import forgetting_attention, why
from acp_repro.attention.triton import launch, notes

pytestmark = pytest.mark.gpu


@pytest.fixture
def repeated(monkeypatch):
    """Nothing is ready at first; a list that grows by one with each pass that is repeated."""
    passes, run = [], notes.Plan.__call__

    def count(self, *given):
        passes.append(self)
        return run(self, *given)

    monkeypatch.setattr(notes.Plan, "__call__", count)
    launch.forget()
    yield passes
    launch.forget()


def inputs(
    length=512,
    keys=None,
    heads=4,
    kv_heads=None,
    head_dim=64,
    dtype=torch.bfloat16,
    offset=0,
    time_first=False,
    seed=0,
    device="cuda",
):
    """q, k, v, log_fgate, dout, head-first; ``offset`` elements after an aligned address."""
    generator = torch.Generator(device).manual_seed(seed)
    keys, kv_heads = keys or length, kv_heads or heads

    def place(x):
        memory = torch.empty(x.numel() + 64, dtype=x.dtype, device=device)
        return memory[offset : offset + x.numel()].view(x.shape).copy_(x)

    def draw(heads, length):
        x = torch.randn(2, length, heads, head_dim, generator=generator, device=device).to(dtype)
        return place(x).transpose(1, 2) if time_first else place(x.transpose(1, 2).contiguous())

    q, k, v, dout = draw(heads, length), draw(kv_heads, keys), draw(kv_heads, keys), draw(heads, length)
    mean = torch.tensor([0.3, 1e-4], device=device).repeat(heads // 2)[:, None]
    gates = torch.empty(2, heads, keys, device=device).exponential_(generator=generator)
    return q, k, v, place(-mean * gates), dout


def both(given, **options):
    """out and the gradients of q, k, v and the gates."""
    *tensors, dout = given
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = forgetting_attention(*leaves, head_first=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def by_triton(call):
    """The result of ``call`` by Triton's own way of launching."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACP_REPRO_PLAIN_LAUNCHES", "1")
        return call()


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


SHAPES = {
    "hopper": {},
    "as the model makes it": {"time_first": True},
    "no multiple of 16": {"length": 500},
    "no multiple of 4": {"length": 513},
    "unaligned": {"offset": 1},
    "shared keys": {"kv_heads": 2},
}
MORE_SHAPES = {
    "fewer queries": {"length": 65, "keys": 320},
    "one query": {"length": 1, "keys": 1},
    "one head of keys, fewer queries": {"kv_heads": 1, "length": 100, "keys": 200},
    "wide heads": {"head_dim": 128},
    "odd heads": {"head_dim": 48, "time_first": True},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
}


def case(name, threshold="tensor", padded=False, slow=False):
    words = name, str(threshold), "padded" if padded else ""
    marks = [pytest.mark.slow] if slow else []  # kernels of their own, which take long to compile
    shape = {**SHAPES, **MORE_SHAPES}[name]
    return pytest.param(shape, threshold, padded, id=", ".join(filter(None, words)), marks=marks)


@pytest.mark.parametrize(
    ("shape", "threshold", "padded"),
    [
        *(case(name) for name in SHAPES),
        *(case("hopper", threshold) for threshold in (None, "auto", -9.0)),
        case("hopper", padded=True),
        *(case(name, slow=True) for name in MORE_SHAPES),
        *(case(name, "auto", padded=True, slow=True) for name in {**SHAPES, **MORE_SHAPES}),
    ],
)
def test_the_third_call_is_the_first(repeated, shape, threshold, padded):
    """At new addresses with new values, and once more at the same."""
    if threshold == "tensor":
        threshold = torch.linspace(-12.0, -6.0, 8, device="cuda").view(2, 4)
    options = {"adaptive_threshold": threshold}
    if padded:
        options["seq_start"] = torch.tensor([0, 3 % shape.get("keys", 512)], device="cuda")
    problems = [inputs(seed=seed, **shape) for seed in range(4)]
    for n, given in enumerate([*problems, problems[-1]]):
        expected = by_triton(lambda given=given: both(given, **options))
        repeated.clear()
        assert_equal(both(given, **options), expected)
        passes = 3 if isinstance(threshold, str) else 2  # "auto" has one of its own
        assert n < 2 or len(repeated) == passes, launch.why_not_ready()
    assert not launch.why_not_ready()


def test_without_gradients_and_with_the_boundary(repeated):
    for seed in range(3):
        *given, _ = inputs(seed=seed)

        def call(given=given):
            with torch.no_grad():
                return forgetting_attention(
                    *given, head_first=True, adaptive_threshold=-9.0, return_start_index=True
                )

        assert_equal(call(), by_triton(call))
    assert len(repeated) == 1


@pytest.mark.parametrize(
    "shapes", [SHAPES, pytest.param({**SHAPES, **MORE_SHAPES}, marks=pytest.mark.slow)], ids=len
)
def test_shapes_take_turns(repeated, shapes):
    """Each with launches of its own, and none with those of another."""
    problems = [inputs(**shape) for shape in shapes.values()]
    q, k, v, log_fgate, dout = problems[0]
    problems += [(q, q, q, log_fgate, dout), (q, k, k, log_fgate, q), problems[0]]
    expected = by_triton(lambda: [both(given, adaptive_threshold=-9.0) for given in problems])
    for _ in range(4):
        for given, one in zip(problems, expected, strict=True):
            assert_equal(both(given, adaptive_threshold=-9.0), one)
    assert len(repeated) > 2 * 2 * len(problems)


def test_an_expanded_gradient_and_strange_strides(repeated):
    for seed in range(3):
        q, k, v, log_fgate, dout = inputs(seed=seed)
        strange = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
        for given in [(q, k, v, log_fgate, dout[:, :, :1, :1].expand_as(q)), (*strange, log_fgate, dout)]:
            assert_equal(both(given), by_triton(lambda given=given: both(given)))


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("over", [(2,), (0, 1, 2, 3), "offset"], ids=["tokens", "all", "offset"])
def test_any_gradient_takes_the_fastest_kernels_and_is_repeated(repeated, over, time_first):
    """That of a mean over tokens, of a sum over all, and one that starts anywhere."""
    for seed in range(3):
        q, k, v, log_fgate, dout = inputs(seed=seed, time_first=time_first)
        if over == "offset":
            given = inputs(seed=seed, time_first=time_first, offset=1)[-1]
        else:
            given = dout.mean(over, keepdim=True).expand_as(dout)
        dense = torch.empty_like(dout).copy_(given)
        tensors = q, k, v, log_fgate
        expected = by_triton(lambda tensors=tensors, dense=dense: both((*tensors, dense)))
        repeated.clear()
        assert_equal(both((*tensors, given)), expected)
    assert len(repeated) == 2, launch.why_not_ready()
    if why(q, k, v, head_first=True) is None:
        assert any("hopper" in kernel.__module__ for kernel in repeated[1].kernels)


@pytest.mark.parametrize("name", ["hopper", "no multiple of 4", "shared keys"])
@pytest.mark.parametrize("warm", [0, 3])
def test_a_graph_of_a_pass_and_of_both(repeated, name, warm):
    """Captured while ready and while not, and run again on other data."""
    shape = SHAPES[name]
    threshold = torch.full((2, 4), -9.0, device="cuda")
    *tensors, dout = inputs(**shape)
    leaves = [x.detach().requires_grad_() for x in tensors]
    both((*tensors, dout), adaptive_threshold=threshold)  # compiled, which a graph cannot hold
    with torch.no_grad():
        forgetting_attention(*leaves, head_first=True, adaptive_threshold=threshold)
    torch.cuda.synchronize()
    launch.forget()

    def forward():
        with torch.no_grad():
            return (forgetting_attention(*leaves, head_first=True, adaptive_threshold=threshold),)

    def whole():
        out = forgetting_attention(*leaves, head_first=True, adaptive_threshold=threshold)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    for call in (forward, whole):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        before = len(repeated)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        passes = 2 if call is whole else 1
        assert len(repeated) - before == (passes if warm else 0)
        for seed in (5, 6):
            with torch.no_grad():
                for x, y in zip((*leaves, dout), inputs(seed=seed, **shape), strict=True):
                    x.copy_(y)
            graph.replay()
            torch.cuda.synchronize()
            assert_equal(captured, by_triton(call))


def test_threads(repeated):
    problems = [inputs(seed=seed, length=length) for seed in range(2) for length in (512, 513)]
    expected = by_triton(lambda: [both(given, adaptive_threshold=-9.0) for given in problems])
    torch.cuda.synchronize()
    wrong = []

    def work(n, stream):
        with torch.cuda.stream(stream):
            for _ in range(20):
                for a, b in zip(both(problems[n], adaptive_threshold=-9.0), expected[n], strict=True):
                    if not torch.equal(a, b):
                        wrong.append(n)

    workers = [threading.Thread(target=work, args=(n, torch.cuda.Stream())) for n in range(len(problems))]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not wrong and len(repeated) > 2 * 15 * len(problems)


def test_the_current_stream_is_the_one_that_waits(repeated):
    """Inputs are written on the stream after a pause; launches on another stream would read too early."""
    stream, given = torch.cuda.Stream(), inputs()
    for _ in range(3):
        both(given)
    torch.cuda.synchronize()
    for seed in (1, 2):
        fresh = inputs(seed=seed)
        expected = by_triton(lambda fresh=fresh: both(fresh))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for x, y in zip(given, fresh, strict=True):
                x.copy_(y)
            actual = both(given)
        stream.synchronize()
        assert_equal(actual, expected)
    assert len(repeated) == 6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="run make test-gpu where two GPUs are")
def test_another_device_than_the_current_one(repeated):
    for _ in range(3):
        results = [both(inputs(device=f"cuda:{n}"), adaptive_threshold=-9.0) for n in (0, 1)]
        torch.cuda.synchronize(1)
        for a, b in zip(*results, strict=True):
            assert b.device.index == 1 and a.shape == b.shape and b.isfinite().all()
    given = inputs(device="cuda:1")
    expected = by_triton(lambda: both(given, adaptive_threshold=-9.0))
    assert_equal(both(given, adaptive_threshold=-9.0), expected)
    assert len(repeated) == 6 and torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "threshold", [-9.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (None, "auto"))]
)
def test_compiled_functions_launch_what_is_ready_too(repeated, threshold):
    def attend(q, k, v, log_fgate):
        return forgetting_attention(q, k, v, log_fgate, head_first=True, adaptive_threshold=threshold) * 2

    compiled = torch.compile(attend, fullgraph=True)
    for seed in range(4):
        *tensors, dout = inputs(seed=seed)
        leaves = [x.detach().requires_grad_() for x in tensors]
        results = []
        for call in (compiled, attend):
            out = call(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        assert_equal(*results)
    assert len(repeated) >= 8


def test_hooks_of_profilers_see_every_launch(repeated):
    given, seen = inputs(), []
    for _ in range(3):
        expected = both(given)
    hook = launch.knobs.runtime.launch_enter_hook

    def note(metadata):
        seen.append(metadata.get()["name"])

    hook.add(note)
    try:
        count = len(repeated)
        assert_equal(both(given), expected)
        assert len(seen) == 8 and len(repeated) == count
    finally:
        hook.remove(note)
    both(given)
    assert len(seen) == 8 and len(repeated) == count + 2


def test_a_triton_that_does_not_show_how_it_launches(repeated, monkeypatch):
    monkeypatch.setattr(notes, "trace", lambda *_: {}["launcher"])
    given = inputs()
    expected = by_triton(lambda: both(given))
    for _ in range(4):
        assert_equal(both(given), expected)
    assert not repeated and "KeyError('launcher')" in launch.why_not_ready()[0]


def test_second_derivatives_are_refused():
    *tensors, dout = inputs()
    leaves = [x.detach().requires_grad_() for x in tensors]
    for _ in range(3):
        out = forgetting_attention(*leaves, head_first=True)
        (grad,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives with implementation='reference'"):
            grad.float().sum().backward()
