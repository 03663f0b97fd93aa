"""The custom operators: one forward and one backward for all implementations.

`torch.compile` sees two opaque operators with known output shapes, so it has no graph break. The running sum
and the boundary are computed once and shared by both passes. :func:`attend` calls the operators, also under
the transforms of `torch.func`. If PyTorch does not have to see an operator, :func:`attend` calls the
functions inside it directly, because dispatching a Python operator costs half a millisecond on the host.
"""

import contextlib
import functools
import importlib

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from .backends import HAS_TRITON, find_backend, kernels
from .boundary import attention_flops
from .checks import AttentionCall, check_gates, check_threshold, check_values
from .threshold import DEFAULT_LOG_PRUNING_TOLERANCE, find_threshold, logit_bound_from_norms, norms_factor


def _run_forward(
    *arguments, for_backward: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """The four results of :meth:`Backend.forward` for the fields of an :class:`AttentionCall`."""
    call = AttentionCall(*arguments)
    check_gates(call.log_fgate)
    check_threshold(call.threshold)
    check_values("seq_start", call.seq_start, 0, call.k.shape[2] - 1)
    with without_autocast(call.q):
        return find_backend(call.implementation).forward(call, for_backward)


def _run_backward(
    dout, q, k, v, log_fgate, out, saved, c, boundary, seq_start, sm_scale, implementation, window_size=None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`_run_forward` with respect to q, k, v and log_fgate."""
    call = AttentionCall(q, k, v, log_fgate, None, seq_start, sm_scale, implementation, window_size)
    with without_autocast(q):
        return find_backend(implementation).backward(dout, call, out, saved, c, boundary)


def without_autocast(q: Tensor) -> contextlib.AbstractContextManager:
    """A context in which matrix products use the dtypes of the implementation, not those of autocast."""
    if torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return contextlib.nullcontext()


_OPTIONS = "float sm_scale, str implementation, SymInt? window_size=None"
_RETURNS = "(Tensor, Tensor, Tensor, Tensor)"
forgetting_attention_op = torch.library.custom_op(
    "acp_repro::forgetting_attention",
    _run_forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_fgate, Tensor? threshold, Tensor? seq_start, "
    f"{_OPTIONS}) -> {_RETURNS}",
)
forgetting_attention_backward_op = torch.library.custom_op(
    "acp_repro::forgetting_attention_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor log_fgate, Tensor out, Tensor lse, Tensor c, "
    f"Tensor boundary, Tensor? seq_start, {_OPTIONS}) -> {_RETURNS}",
)


@forgetting_attention_op.register_fake
def _(q, k, v, log_fgate, threshold, seq_start, sm_scale, implementation, window_size=None):
    backend = find_backend(implementation)
    blocks = -(-q.shape[2] // backend.block_sizes(q.shape[-1], q.dtype)[0])
    return (
        torch.empty_like(q),
        q.new_empty(backend.saved_shape(q), dtype=torch.float32),
        log_fgate.new_empty(log_fgate.shape, dtype=torch.float64),
        log_fgate.new_empty((*log_fgate.shape[:2], blocks), dtype=torch.int32),
    )


@forgetting_attention_backward_op.register_fake
def _(dout, q, k, v, log_fgate, *_):
    return *map(torch.empty_like, (q, k, v)), log_fgate.new_empty(log_fgate.shape)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out (B, H, Tq, D) like q and boundary (B, H, M) int32, also under the transforms of ``torch.func``.

    Backends with ``by_autograd`` support derivatives of any mode and order. For all others, forward-mode and
    second derivatives raise NotImplementedError: the operators have no formula for them, and torch would
    silently return a tangent of zero.
    """
    if find_backend(call.implementation).by_autograd:
        out, _, _, boundary = _run_forward(*call)
    elif not _needs_no_operator(call[:6]):
        out, _, _, boundary = _call_operator(forgetting_attention_op, _Attend, call)
    elif _wants_gradients(call[:4]):
        out, boundary = _AttendPlainly.apply(*call)
    else:
        return infer(call)
    return out, boundary


def infer(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """:func:`attend` without an operator and without gradients."""
    out, _, _, boundary = _run_forward(*call, for_backward=False)
    return out, boundary


def launches_alone(tensors: tuple[Tensor, ...]) -> bool:
    """Whether :func:`infer` can serve a call on ``tensors`` without reading their values."""
    plain = _needs_no_operator(tensors) and all(isinstance(x, Tensor) for x in tensors)
    return plain and not (_wants_gradients(tensors) or torch.is_anomaly_enabled())


def _needs_no_operator(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether PyTorch runs eagerly, without transforms or modes that intercept operators."""
    # FakeTensor, `make_fx` and selective checkpointing use such modes.
    if torch.compiler.is_compiling():
        return False
    return not (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or any(
            # `torch.set_default_device` also sets a mode, but that mode ignores operators with inputs.
            not isinstance(torch._C._get_function_stack_at(n), DeviceContext)
            for n in range(torch._C._len_torch_function_stack())
        )
    ) and all(map(_holds_its_values, tensors))


def _holds_its_values(x: Tensor | None) -> bool:
    """Whether ``x`` is None or an ordinary tensor whose memory contains its values."""
    # With ``is_grads_batched`` or ``vectorize``, a gradient is a batch that appears as one tensor, without an
    # active transform; PyTorch calls the operator once per element. A tensor with the negative bit, such as
    # ``z.conj().imag``, has the opposite sign in memory; PyTorch resolves it before it calls the operator.
    if x is None:
        return True
    if type(x) not in (Tensor, torch.nn.Parameter) or x.is_neg():
        return False
    return not is_legacy_batchedtensor(x)


def _wants_gradients(tensors: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _call_operator(operator, transformable: type[torch.autograd.Function], arguments: tuple):
    """Calls the operator or, under a function transform of torch, its autograd.Function."""
    forward_mode = forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        # Dynamo traces through an autograd.Function, drops its jvp and cannot trace its vmap. The operator
        # has rules for both. It has no rule for torch.func.grad, for which torch raises an error in compiled
        # code.
        if forward_mode:
            raise NotImplementedError(_ONLY_REFERENCE.format("forward-mode derivatives"))
    elif forward_mode or torch._C._are_functorch_transforms_active():
        return transformable.apply(*arguments)
    return operator(*arguments)


_ONLY_REFERENCE = (
    "forgetting_attention supports {} only with implementation='reference'; the others support gradients "
    "(backward, torch.func.grad, vjp, jacrev) and vmap"
)


def _setup_context(ctx, inputs, output):
    q, k, v, log_fgate, _, seq_start, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, log_fgate, *output, seq_start)


def _backward(ctx, dout, *_):
    tensors = (dout, *ctx.saved_tensors)
    arguments = (*tensors, *ctx.options)
    if _needs_no_operator(tensors) and not _wants_gradients(tensors[:5]):
        grads = _run_backward(*arguments)
    else:
        grads = _call_operator(forgetting_attention_backward_op, _AttendBackward, arguments)
    return (*grads, None, None, None, None, None)


def _refuse_second_derivatives(ctx, *_):
    raise NotImplementedError(_ONLY_REFERENCE.format("second derivatives"))


forgetting_attention_op.register_autograd(_backward, setup_context=_setup_context)
forgetting_attention_backward_op.register_autograd(_refuse_second_derivatives)


class _AttendPlainly(torch.autograd.Function):
    """The two passes without operators; a second derivative calls the backward operator, which rejects it."""

    # A separate `setup_context` would make PyTorch look up the signature of `forward` at each call.
    @staticmethod
    def forward(ctx, *arguments):
        outputs = _run_forward(*arguments)
        _setup_context(ctx, arguments, outputs)
        out, _, _, boundary = outputs
        ctx.mark_non_differentiable(boundary)
        ctx.set_materialize_grads(False)
        return out, boundary

    @staticmethod
    def backward(ctx, dout, _):
        return (None,) * 9 if dout is None else _backward(ctx, dout)


class _Attend(torch.autograd.Function):
    """The forward operator with its derivatives, in the form that torch.func can transform."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: forgetting_attention_op(*arguments))
    backward = staticmethod(_backward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        _setup_context(ctx, inputs, output)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(_ONLY_REFERENCE.format("forward-mode derivatives"))


class _AttendBackward(torch.autograd.Function):
    """The backward operator in the form that torch.func can transform."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: forgetting_attention_backward_op(*arguments))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = jvp = staticmethod(_refuse_second_derivatives)


def _fold_into_batch(operator):
    """Registers the ``torch.vmap`` rule of a batch-first operator: fold the new dimension into the batch."""

    def rule(info, in_dims, *arguments):
        size = info.batch_size

        def fold(x, dim):
            if not isinstance(x, Tensor):
                return x
            return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        outputs = operator(*map(fold, arguments, in_dims))
        return tuple(y.unflatten(0, (size, y.shape[0] // size)) for y in outputs), (0,) * len(outputs)

    operator.register_vmap(rule)


_fold_into_batch(forgetting_attention_op)
_fold_into_batch(forgetting_attention_backward_op)


@torch.library.custom_op("acp_repro::threshold_from_norms", mutates_args=())
def threshold_from_norms_op(q: Tensor, k: Tensor, factor: float, log_pruning_tolerance: float) -> Tensor:
    """delta (B, H) from ``U = factor max_i ||q_i|| max_j ||k_j||`` and L = Tk, on a GPU, without gradient."""
    return kernels().threshold_from_norms(q, k, factor, log_pruning_tolerance)


@threshold_from_norms_op.register_fake
def _(q, k, factor, log_pruning_tolerance):
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def threshold_from_norms(
    q: Tensor,
    k: Tensor,
    sm_scale: float | None = None,
    log_pruning_tolerance: float = DEFAULT_LOG_PRUNING_TOLERANCE,
) -> Tensor:
    """:func:`pruning_threshold` (B, H) with U from :func:`logit_bound_from_norms` and L = Tk."""
    if HAS_TRITON and all(x.is_cuda and x.dtype.itemsize <= 4 for x in (q, k)):
        # Three kernels with the same number of roundings; torch's own reduction takes six times as long.
        call = kernels().threshold_from_norms if _needs_no_operator((q, k)) else threshold_from_norms_op
        return call(q.detach(), k.detach(), norms_factor(q.shape[-1], sm_scale), log_pruning_tolerance)
    return find_threshold(logit_bound_from_norms(q, k, sm_scale), k.shape[2], log_pruning_tolerance)


@functools.cache
def register_flop_formulas() -> None:
    """Makes ``torch.utils.flop_counter.FlopCounterMode`` count forgetting attention.

    Call this function before a counter is created. Importing the package does not register the formulas,
    because PyTorch's counter imports Triton. The formulas count the scores on and below the diagonal in
    visited blocks, or in all causal blocks if the boundary has no values (fake and meta tensors). On a GPU
    each count synchronises the host with the device to read the boundary.
    """
    register = importlib.import_module("torch.utils.flop_counter").register_flop_formula
    register(torch.ops.acp_repro.forgetting_attention, get_raw=True)(
        lambda q, k, *rest, out_val: _visited_flops(q, k, out_val[3], rest[5], backward=False)
    )
    register(torch.ops.acp_repro.forgetting_attention_backward, get_raw=True)(
        lambda _, q, k, *rest, out_val: _visited_flops(q, k, rest[5], rest[8], backward=True)
    )


def _visited_flops(q: Tensor, k: Tensor, boundary: Tensor, implementation: str, backward: bool) -> int:
    (batch, heads, seqlen_q, head_dim), seqlen_k = q.shape, k.shape[2]
    scores = batch * heads * seqlen_q * (2 * seqlen_k - seqlen_q + 1) // 2
    if type(boundary) is Tensor and not boundary.is_meta:
        block_q, block_k = find_backend(implementation).block_sizes(head_dim, q.dtype)
        queries = torch.full(boundary.shape[-1:], block_q, device=boundary.device)
        queries[-1] = seqlen_q - block_q * (len(queries) - 1)  # the last query block may be short
        scores -= block_k * int((boundary * queries).sum())
    return int(attention_flops(scores, 1, 1, head_dim, backward))
