"""Launches that are kept ready give what Triton's own way of launching gives, bit for bit.

Without a GPU the kernels run in Triton's interpreter, behind a launcher that gets addresses as the one in C
does. What Triton gives that one is read off Triton's own launcher, which needs no GPU for it.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="pip install triton")

import triton
from torch.utils._python_dispatch import _disable_current_modes

from acp_repro.attention import forgetting_attention, pruning_threshold
from acp_repro.attention import triton as kernels
from acp_repro.attention.triton import launch, notes

GPU = torch.cuda.is_available()
needs_interpreter = pytest.mark.skipif(GPU, reason="the interpreter; run make test where no GPU is")


def extent(x: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if x.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize


@pytest.fixture
def launched(monkeypatch):
    """Ready launches on a CPU; the list that it gives has the stream of each one that went past Triton."""
    from triton.runtime.interpreter import InterpretedFunction

    streams = []

    def trace(kernel, compiled, grid, arguments, constants):
        assert compiled is None
        kinds = [(x.dtype, extent(x)) if isinstance(x, torch.Tensor) else None for x in arguments]

        def run(stream, _, given):
            assert not any(isinstance(x, torch.Tensor) for x in given)
            streams.append(stream)
            kept, ready = [], []
            for x, kind in zip(given, kinds, strict=True):
                if kind is not None:
                    buffer = (ctypes.c_char * kind[1]).from_address(x)
                    kept.append(buffer)
                    x = torch.frombuffer(buffer, dtype=kind[0])
                ready.append(x)
            kernel[grid](*ready, **constants)

        return run, (notes._STREAM, 0, arguments), []

    run, one_by_one = InterpretedFunction.run, threading.RLock()  # the interpreter knows one thread

    def run_unseen(self, *arguments, **options):
        with one_by_one, _disable_current_modes():  # on a GPU no launch calls an operator of PyTorch
            return run(self, *arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run_unseen)
    monkeypatch.setattr(notes, "trace", trace)
    monkeypatch.setattr(notes, "current_stream", lambda device: 77)
    monkeypatch.setattr(launch, "can_be_ready", lambda x: not torch._C._len_torch_dispatch_stack())
    launch.forget()
    yield streams
    launch.forget()


def as_it_stands(monkeypatch, call):
    """The result of ``call`` with nothing kept ready."""
    with monkeypatch.context() as patch:
        patch.setattr(launch, "can_be_ready", lambda x: False)
        return call()


def inputs(
    seqlen=40, seqlen_k=None, batch=1, heads=2, kv_heads=None, head_dim=16, offset=0, transposed=False, seed=0
):
    """q, k, v, log_fgate, dout, head-first; ``offset`` elements after an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    kv = kv_heads or heads
    seqlen_k = seqlen_k or seqlen

    def place(x):
        memory = torch.empty(x.numel() + 64)
        assert memory.data_ptr() % 16 == 0
        return memory[offset : offset + x.numel()].view(x.shape).copy_(x)

    def draw(heads, length):
        x = torch.randn(batch, length, heads, head_dim, generator=generator)
        return place(x).transpose(1, 2) if transposed else place(x.transpose(1, 2).contiguous())

    q, k, v, dout = draw(heads, seqlen), draw(kv, seqlen_k), draw(kv, seqlen_k), draw(heads, seqlen)
    return q, k, v, place(-torch.rand(batch, heads, seqlen_k, generator=generator)), dout


def both(given, **options):
    *tensors, dout = given
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = forgetting_attention(*leaves, head_first=True, implementation="triton", **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        slow({"batch": 2}, {"adaptive_threshold": torch.tensor([[-1.0, -4.0], [-2.0, -3.0]])}),
        slow({"seqlen": 33, "offset": 1}, {"adaptive_threshold": -2.0}),
        slow(
            {"batch": 2, "seqlen": 16, "seqlen_k": 48, "transposed": True},
            {"seq_start": torch.tensor([0, 21])},
        ),
        ({"heads": 4, "kv_heads": 2}, {"adaptive_threshold": "auto"}),
    ],
)
def test_the_third_call_is_the_first(launched, monkeypatch, shape, options):
    """With new values at new addresses, by eight launches that go past Triton."""
    for seed in range(3):
        given = inputs(seed=seed, **shape)
        expected = as_it_stands(monkeypatch, lambda given=given: both(given, **options))
        count = len(launched)
        assert_equal(both(given, **options), expected)
        assert len(launched) - count == (8 if seed > 1 else 0), launch.why_not_ready()
        assert set(launched) <= {77}
    assert not launch.why_not_ready()


@needs_interpreter
def test_without_gradients_and_with_the_boundary(launched, monkeypatch):
    for seed in range(3):
        *given, _ = inputs(seed=seed)

        def call(given=given):
            return forgetting_attention(
                *given,
                head_first=True,
                implementation="triton",
                adaptive_threshold=-1.0,
                return_start_index=True,
            )

        assert_equal(call(), as_it_stands(monkeypatch, call))
    assert len(launched) == 4


@needs_interpreter
def test_norms(launched):
    for seed in range(3):
        q, k, *_ = inputs(seed=seed)
        expected = pruning_threshold(q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1), k.shape[2], -3.0)
        torch.testing.assert_close(kernels.threshold_from_norms(q, k, 1.0, -3.0), expected)
    assert len(launched) == 3


@needs_interpreter
def test_one_tensor_given_twice_may_be_two_next_time(launched, monkeypatch):
    q, k, v, log_fgate, dout = inputs()
    for given in [(q, q, q, log_fgate, dout)] * 3 + [(q, k, v, log_fgate, dout), (k, v, v, log_fgate, dout)]:
        expected = as_it_stands(monkeypatch, lambda given=given: both(given))
        assert_equal(both(given), expected)
    assert len(launched) == 24


@pytest.mark.slow
@needs_interpreter
def test_each_shape_alignment_and_stride_has_launches_of_its_own(launched, monkeypatch):
    shapes = [{}, {"offset": 1}, {"seqlen": 33}, {"transposed": True}, {"offset": 4}]
    problems = [inputs(**shape) for shape in shapes]
    expected = as_it_stands(monkeypatch, lambda: [both(given) for given in problems])
    for a, b in zip([both(given) for given in problems * 3], expected * 3, strict=True):
        assert_equal(a, b)
    # Four elements further is as aligned as none.
    assert len(launched) == 8 * (3 + 4)
    assert {len(call.plans) for call in launch._ready if call.plans} == {len(shapes) - 1}


@needs_interpreter
def test_rows_that_the_kernels_cannot_write_are_copied_every_time(launched, monkeypatch):
    for seed in range(3):
        given = inputs(seed=seed)
        given = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in given[:3]] + list(given[3:])
        expected = as_it_stands(monkeypatch, lambda given=given: both(given))
        assert_equal(both(given), expected)
    assert not launched and any("aten" in reason for reason in launch.why_not_ready())


@needs_interpreter
@pytest.mark.parametrize(
    ("over", "first"),
    [
        ((2,), {"transposed": True}),
        ((0, 1, 2, 3), {}),
        slow((2,), {}),
        slow((0, 1, 2, 3), {"transposed": True}),
    ],
    ids=["tokens-time", "all-heads", "tokens-heads", "all-time"],
)
def test_gradients_that_are_expanded_are_repeated_too(launched, monkeypatch, over, first):
    """Those of a mean over tokens, and of a sum over all."""
    for seed in range(3):
        *given, dout = inputs(seed=seed, **first)
        given.append(dout.mean(over, keepdim=True).expand_as(dout))
        expected = as_it_stands(monkeypatch, lambda given=given: both(given))
        count = len(launched)
        assert_equal(both(given), expected)
        assert len(launched) - count == (8 if seed > 1 else 0), launch.why_not_ready()


@needs_interpreter
def test_threads_do_not_see_each_others_launches(launched, monkeypatch):
    problems = [inputs(seed=seed) for seed in range(2)]
    expected = as_it_stands(monkeypatch, lambda: [both(given) for given in problems])
    actual = [None] * len(problems)

    def work(n):
        for _ in range(3):
            actual[n] = both(problems[n])

    workers = [threading.Thread(target=work, args=(n,)) for n in range(len(problems))]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    for a, b in zip(actual, expected, strict=True):
        assert_equal(a, b)


def of_one(function):
    """``function`` ready, called three times; why it is not repeated."""
    call = launch.ready(function)
    try:
        for _ in range(3):
            call(torch.zeros(4), ())
        return launch.why_not_ready()
    finally:
        launch._ready.remove(call)


@needs_interpreter
def test_what_is_more_than_launches_is_never_repeated(launched):
    assert of_one(lambda x, constants: (torch.empty_like(x),)) == []
    assert "aten.zero_" in of_one(lambda x, constants: (torch.empty_like(x).zero_(),))[0]
    assert "aten.add" in of_one(lambda x, constants: (x + 1,))[0]
    assert "did not allocate" in of_one(lambda x, constants: (x,))[0]
    assert "did not allocate" in of_one(lambda x, constants: (torch.empty(2, 2)[0],))[0]
    other = torch.zeros(4)
    (reason,) = of_one(lambda x, constants: launch.launch(_Nothing(), (1,), other) or ())
    assert "neither an argument nor its own" in reason


class _Nothing:
    """A kernel that does nothing."""

    pre_run_hooks = ()

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


@needs_interpreter
def test_a_triton_that_does_not_show_how_it_launches_launches_itself(monkeypatch):
    monkeypatch.setattr(launch, "can_be_ready", lambda x: not torch._C._len_torch_dispatch_stack())
    (reason,) = of_one(lambda x, constants: launch.launch(_Nothing(), (1,), x) or ())
    assert f"Triton {triton.__version__} does not show how it launches: AttributeError" in reason


class PyCUtensorMap:
    """As the type of that name in Triton's driver, which is written in C."""

    def __init__(self, *filled_with):
        self.filled_with = filled_with


class _Compiled:
    """A kernel behind Triton's own launcher for CUDA, but for the functions in C."""

    pre_run_hooks = ()
    signature = inspect.signature(lambda x, y, made, n, scale, absent, ROWS, FLAG=True: None)

    def __init__(self, described: bool):
        driver = pytest.importorskip("triton.backends.nvidia.driver", reason="pip install triton")
        tensors = ("tensordesc<bf16[1,64]>", "tensordesc<bf16[1,32]>") if described else ("*bf16", "*bf16")
        kinds = (*tensors, "*fp32", "i32", "fp32", *3 * ("constexpr",))
        fact = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
        meta = [{**fact, "block_size": [1, n]} for n in (64, 32)] if described else None
        self.src = SimpleNamespace(signature=dict(zip(self.signature.parameters, kinds, strict=True)))
        self.metadata = SimpleNamespace(tensordesc_meta=meta)
        self.function, self.packed_metadata = 1234, (4, 1, 100)
        sizes = {f"{name}_scratch_{what}": 0 for name in ("global", "profile") for what in ("size", "align")}
        more = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "gsan_enabled": False}
        self.run = object.__new__(driver.CudaLauncher)
        vars(self.run).update(**sizes, **more, arg_annotations=["annotations"], kernel_signature=b"signature")
        self.in_c = _InC()
        self.run.launch = driver.wrap_handle_tensordesc(self.in_c, self.src.signature, meta)

    def __getitem__(self, grid):
        def run(*arguments, num_warps, **constants):
            given = self.signature.bind(*arguments, **constants)
            given.apply_defaults()
            three = (*grid, 1, 1)[:3]
            hooks = (None, None, None)  # the launch's metadata, and hooks before and after
            self.run(*three, 99, self.function, self.packed_metadata, *hooks, *given.arguments.values())
            return self

        return run


class _InC:
    """In the place of a function in C; what it was called with, as far as that one reads it."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append([self.read(x) for x in arguments])

    def read(self, x):
        if isinstance(x, (tuple, list)):
            return [self.read(y) for y in x]
        if isinstance(x, PyCUtensorMap):
            return self.read(x.filled_with)
        return x.data_ptr() if hasattr(x, "data_ptr") else x


@pytest.mark.parametrize("described", [True, False])
def test_the_function_in_c_is_given_what_triton_gives_it(monkeypatch, described):
    """Through the launcher of the Triton that is installed, with descriptors and without."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    filled = []

    def fill(*given):
        filled.append(given)
        return PyCUtensorMap(*given)

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(launch, "can_be_ready", lambda x: not torch._C._len_torch_dispatch_stack())
    monkeypatch.setattr(notes, "current_stream", lambda device: 99)
    kernel = _Compiled(described)

    def function(x, y, absent, constants, made=None):
        made = torch.empty(2, 3) if made is None else made
        if described:
            x, y = (TensorDescriptor(t, [4, 64], [64, 1], [1, n]) for t, n in ((x, 64), (y, 32)))
        launch.launch(kernel, (7, 3), x, y, made, 5, 0.5, absent, ROWS=constants[0], num_warps=4)
        return (made,)

    call = launch.ready(function)
    launch._ready.remove(call)
    problems = [[torch.zeros(4, 64, dtype=torch.bfloat16) for _ in "xy"] for _ in range(3)]
    for x, y in [*problems, problems[2]]:
        (made,) = call(x, y, None, (16,))
        filled_by_call = len(filled)
        function(x, y, None, (16,), made)
        of_call, of_triton = kernel.in_c.calls[-2:]
        assert of_call == of_triton and made.shape == (2, 3)
        assert list(map(type, of_call)) == list(map(type, of_triton))
    (plan,) = call.plans.values()
    assert plan.refused is None
    # The third call fills two maps; the fourth has the same addresses and fills none.
    assert sum(one[0] == problems[2][0].data_ptr() for one in filled) == (3 if described else 0)
    assert filled_by_call == len(filled) - (2 if described else 0)


def test_plans_are_bounded(launched, monkeypatch):
    monkeypatch.setattr(launch, "MOST_PLANS", 3)
    call = launch.ready(lambda x, constants: (torch.empty_like(x),))
    launch._ready.remove(call)
    for length in range(1, 20):
        call(torch.zeros(length), ())
        assert len(call.plans) <= 3


def test_nothing_is_ready_where_somebody_looks_on(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch.can_be_ready(on_gpu) and not launch.can_be_ready(torch.zeros(1))
    runtime = launch.knobs.runtime
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(runtime, name)
        if hasattr(hook, "add"):
            hook.add(print)
            assert not launch.can_be_ready(on_gpu)
            hook.remove(print)
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, print)
            assert not launch.can_be_ready(on_gpu)
            patch.setattr(runtime, name, None)
            assert launch.can_be_ready(on_gpu)
    for owner, name, value in (
        (runtime, "debug", True),
        (launch.knobs.compilation, "instrumentation_mode", "proton"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not launch.can_be_ready(on_gpu)
    with notes.Notes([]):
        assert not launch.can_be_ready(on_gpu)
    for value, ready in (("0", True), ("1", False)):
        monkeypatch.setenv("ACP_REPRO_PLAIN_LAUNCHES", value)
        assert launch.can_be_ready(on_gpu) == ready
    monkeypatch.delenv("ACP_REPRO_PLAIN_LAUNCHES")
    monkeypatch.setattr(launch, "knobs", None)
    assert not launch.can_be_ready(on_gpu)
