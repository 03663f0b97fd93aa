"""`torch.func` and other derivatives of `forgetting_attention` are correct or raise an informative error."""

import functools

import pytest
import torch
from torch import func

from acp_repro.attention import forgetting_attention
from acp_repro.attention.backends import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THRESHOLD = -6.0  # prunes blocks of the local head, see `inputs`
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="pip install triton")
# All implementations share their interface to torch.func, and Triton's interpreter is slow.
FAST = ["blockwise", pytest.param("triton", marks=[needs_triton, pytest.mark.slow])]


@pytest.fixture
def inputs():
    """(3, B, T, H, D) q, k, v and (3, B, T, H) log gates: three problems of one shape to map over."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 3, 2, 130, 2, 16, generator=generator, dtype=torch.float32).to(DEVICE)
    log_fgate = -torch.rand(3, 2, 130, 2, generator=generator) * torch.tensor([0.5, 1e-3])
    return q, k, v, log_fgate.to(DEVICE)


def calls(implementation, threshold=THRESHOLD):
    return functools.partial(
        forgetting_attention, adaptive_threshold=threshold, implementation=implementation
    )


def loss(implementation, threshold=THRESHOLD):
    return lambda *x: calls(implementation, threshold)(*x).square().sum()


@pytest.mark.parametrize("implementation", FAST)
def test_vmap_over_any_dimension_or_a_single_argument_equals_separate_calls(inputs, implementation):
    """Random calls map all arguments and gradients over the first dimension."""
    call, (q, *rest) = calls(implementation), inputs
    each = [call(*(x[n] for x in inputs)) for n in range(3)]
    moved = [x.movedim(0, 2) for x in inputs]
    assert torch.equal(func.vmap(call, in_dims=2)(*moved), torch.stack(each))
    shared = [x[0] for x in rest]
    mapped = func.vmap(call, in_dims=(0, None, None, None))(q, *shared)
    assert torch.equal(mapped, torch.stack([call(one, *shared) for one in q]))


def test_vmap_over_thresholds_and_starts(inputs):
    one = [x[0].cpu() for x in inputs]  # a CPU checks values; its results are independent of the batch
    thresholds = torch.tensor([-3.0, -6.0, -9.0])
    starts = torch.tensor([[0, 1], [70, 5], [129, 0]])

    def call(threshold, start):
        return forgetting_attention(
            *one, adaptive_threshold=threshold, seq_start=start, implementation="blockwise"
        )

    mapped = func.vmap(call)(thresholds, starts)
    for n in range(3):
        assert torch.equal(mapped[n], call(thresholds[n], starts[n]))
    with pytest.raises(ValueError, match=r"seq_start must be in \[0, 129\]"):
        func.vmap(call)(thresholds, starts + 1)


@needs_triton
@pytest.mark.slow
def test_one_start_index_is_shared_by_mapped_calls(inputs):
    """In a batch of one, the tensor becomes a view with stride 0, past whose end the kernels read."""
    problems = [x[:, :1, :70, :1].contiguous() for x in inputs]
    memory = torch.tensor([60, -(2**40), 2**40], device=DEVICE)

    def call(*x):
        options = {"seq_start": memory[:1], "implementation": "triton", "return_start_index": True}
        return forgetting_attention(*x, adaptive_threshold=-1e9, **options)

    def pulled(*x):
        out, pull, _ = func.vjp(call, *x, has_aux=True)
        return out, *pull(torch.ones_like(out))

    for function in (call, pulled):
        mapped = func.vmap(function)(*problems)
        each = [function(*(x[n] for x in problems)) for n in range(3)]
        for a, b in zip(mapped, zip(*each, strict=True), strict=True):
            assert torch.equal(a, torch.stack(b))


def test_forward_mode_of_the_reference_is_correct(inputs):
    one = [x[0].double() for x in inputs]
    tangents = [torch.randn_like(x) for x in one]
    _, tangent = func.jvp(calls("reference"), tuple(one), tuple(tangents))
    _, pull = func.vjp(calls("reference"), *one)
    dout = torch.randn_like(tangent)
    expected = sum((g * t).sum() for g, t in zip(pull(dout), tangents, strict=True))
    torch.testing.assert_close((dout * tangent).sum(), expected)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("argument", [0, 3])
def test_unsupported_forward_mode_raises_instead_of_returning_zero(inputs, implementation, argument):
    """Without the error, the tangent would be zero."""
    one = [x[0] for x in inputs]

    def of_one(x):
        return calls(implementation)(*one[:argument], x, *one[argument + 1 :])

    x = one[argument]
    message = "forward-mode derivatives only with implementation='reference'"
    with pytest.raises(NotImplementedError, match=message):
        func.jvp(of_one, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=message):
            of_one(dual)
        of_one(x)  # none of its inputs has a tangent


@pytest.mark.parametrize("implementation", FAST)
def test_second_derivatives_are_rejected(inputs, implementation):
    one = [x[0].requires_grad_() for x in inputs]
    (first,) = torch.autograd.grad(loss(implementation)(*one), one[0], create_graph=True)
    message = "second derivatives only with implementation='reference'"
    with pytest.raises(NotImplementedError, match=message):
        first.sum().backward()
    one = [x.detach() for x in one]
    with pytest.raises(NotImplementedError, match=message):
        func.grad(lambda *x: func.grad(loss(implementation))(*x).sum())(*one)
    with pytest.raises(NotImplementedError, match="only with implementation='reference'"):
        func.hessian(lambda s: loss(implementation)(one[0] * s, *one[1:]))(torch.tensor(1.0, device=DEVICE))
