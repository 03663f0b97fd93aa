"""The dispatch of both passes: the Hopper kernels if they support a call, else the portable kernels.

The operator calls :func:`forward_pass` and :func:`backward_pass`; their launches are recorded and replayed.
The last argument of both is a tuple of constants: sm_scale; (block_q, block_k), the pruning grid; window_size
or None; whether only portable kernels may run; and for the forward pass whether to return lse and c, and
delta if it is one number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from .backward import launch_backward
from .forward import launch_forward
from .gates import decay_terms, log_fgate_grad, read_gates
from .launch import find_portable_request, repeat_launches
from .tiles import allocate_rows, can_stream, is_streamable, make_addressable, tiles_for

# Queries and keys in a tile of the Hopper forward.
_HOPPER_TILE = (128, 64)
# The compile error of the Hopper kernels, by the kind of inputs; such calls use the portable kernels.
_refused: dict[tuple, str] = {}


@repeat_launches
def forward_pass(q, k, v, log_fgate, threshold, seq_start, constants):
    """Output, lse (B, H, Tq) float32 and c (B, H, Tk) float64 or None, and boundary (B, H, M) int32."""
    sm_scale, grid, window_size, portable, for_backward, delta = constants
    seq_start = seq_start if seq_start is None else seq_start.contiguous()  # kernels take no stride for it
    # Without a threshold, the search writes zeros, which costs no more than a separate fill.
    layout, delta = terms_layout(q, k.shape[2], *grid), threshold if delta is None else delta
    c, terms, boundary = read_gates(log_fgate, None, layout, grid, q.shape[2], delta, seq_start, window_size)
    out, lse = forward(q, k, v, c, boundary, seq_start, sm_scale, *grid, window_size, terms, portable)
    return (out, lse, c, boundary) if for_backward else (out, None, None, boundary)


def backward_pass(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants):
    """Gradients of out with respect to q, k, v and log_fgate, in their shapes; the last is contiguous."""
    # Outside the recorded function, because a copy inside would prevent replaying.
    dout = make_addressable(dout)
    if not is_streamable(dout) and can_stream(q, k, v):
        # The gradient of a mean is expanded, with strides of 0, and that of a slice may be unaligned. A copy
        # costs less time than the slower kernels that read such layouts.
        dout = dout.clone(memory_format=torch.contiguous_format)
    constants = (*constants, find_refusal(q, k, *constants[1], portable=constants[3]))
    dq, dk, dv, grad = _backward(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants)
    return dq, _sum_of_shares(dk, k), _sum_of_shares(dv, v), grad


@repeat_launches
def _backward(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants):
    sm_scale, grid, window_size, portable, _ = constants
    seq_start = seq_start if seq_start is None else seq_start.contiguous()
    options = (sm_scale, *grid, window_size, portable)
    dq, dk, dv, dc = backward(dout, q, k, v, out, lse, c, boundary, seq_start, *options)
    return dq, dk, dv, log_fgate_grad(dc, log_fgate)


def _sum_of_shares(shares: Tensor, like: Tensor) -> Tensor:
    """The gradient of ``like`` (B, Hkv, Tk, D), the sum of ``shares`` (B, H, Tk, D) in a fixed order."""
    if shares.shape[1] == like.shape[1]:
        return shares
    return torch.empty_like(like).copy_(shares.unflatten(1, (like.shape[1], -1)).sum(2))


def forward(
    q,
    k,
    v,
    c,
    boundary,
    seq_start,
    sm_scale,
    block_q,
    block_k,
    window_size=None,
    terms=None,
    portable=False,
    packed=None,
) -> tuple[Tensor, Tensor]:
    """``O = softmax(sm_scale Q K^T + D) V`` over the kept blocks of the causal grid.

    q, k, v, seq_start and window_size are those of :class:`..checks.AttentionCall`, c is (B, H, Tk) float64.
    boundary (B, H, M) int32 is non-decreasing along M; None keeps every block. terms are the terms of c in
    the layout of :func:`terms_layout`, if already computed. portable excludes the Hopper kernels.
    packed (B, 2) int64 is given if k and v are (1, 1, N, D), the keys of all batch rows, each row's one after
    another: the row of N at which a batch row's key 0 is or would be, and the first key that is present.

    Returns:
        out like q, and lse (B, H, Tq) float32, the logarithm of each row's sum. Its base is 2, as the
        backward pass reads it, because converting it would round twice. A row without keys has out 0 and lse
        -inf.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tile = tiles_for(q, block_q, block_k).forward
    if terms is None:
        terms = decay_terms(c.contiguous(), seq_start, *terms_layout(q, c.shape[2], block_q, block_k))
    q, k, v = (make_addressable(x) for x in (q, k, v))
    boundary = None if boundary is None else boundary.contiguous()
    rows = allocate_rows(out)
    given = (q, k, v, rows, lse, terms, boundary, seq_start, sm_scale, block_q, block_k)
    recompute_tiles = None
    options = {"window_size": window_size, "portable": portable, "packed": packed is not None}
    hopper = find_hopper(q, k, v, block_q, block_k, **options)
    # With 64 dimensions, the portable kernel is faster on an H200 at 4k to 16k
    # (docs/lab-notebook/attention-kernels.md).
    if hopper is not None and q.shape[3] == 128 and tile[:2] == _HOPPER_TILE:
        marks = lse.new_empty((*q.shape[:2], triton.cdiv(q.shape[2], tile.rows), 2), dtype=torch.int32)
        if _try_launch(hopper.launch_forward, (*given, marks, packed), _kernel_key(q, k, block_q, block_k)):
            recompute_tiles = marks
    launch_forward(*given, tile, window_size, recompute_tiles, packed)
    if rows is not out:
        out.copy_(rows)
    return out, lse


def backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    c,
    boundary,
    seq_start,
    sm_scale,
    block_q,
    block_k,
    window_size=None,
    portable=False,
    shares=False,
    packed=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv and dc (B, H, Tk) float32 of :func:`forward` over the same kept blocks.

    If query heads share keys, or with ``shares``, dk and dv are (B, H, Tk, D) float32, the contribution of
    each query head. With ``packed`` keys, they are (1, H, N, D). The function only allocates and launches,
    as :mod:`.launch` requires.
    """
    dq = torch.empty_like(q)
    if q.shape[1] == k.shape[1] and not shares:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:
        shape = (k.shape[0], q.shape[1], *k.shape[2:])
        dk, dv = (torch.empty(shape, dtype=torch.float32, device=k.device) for _ in "kv")
    dc = torch.empty(c.shape, dtype=torch.float32, device=q.device)
    grads = [allocate_rows(x) for x in (dq, dk, dv)]
    boundary = None if boundary is None else boundary.contiguous()
    dout, q, k, v, out = (make_addressable(x) for x in (dout, q, k, v, out))
    given = (dout, q, k, v, out, lse.contiguous(), c.contiguous(), boundary, seq_start)
    given += (sm_scale, block_q, block_k, *grads, dc)
    options = {"window_size": window_size, "portable": portable, "packed": packed is not None}
    hopper = find_hopper(q, k, v, block_q, block_k, dout, **options)
    key = _kernel_key(q, k, block_q, block_k)
    if hopper is None or not _try_launch(hopper.launch_backward, (*given, packed), key):
        launch_backward(*given, tiles_for(q, block_q, block_k), window_size, packed)
    for wanted, grad in zip((dq, dk, dv), grads, strict=True):
        if wanted is not grad:
            wanted.copy_(grad)
    return dq, dk, dv, dc


def terms_layout(q, seqlen_k, block_q, block_k) -> tuple[int, int]:
    """The layout of the terms of c for :func:`forward`: keys in a tile, and numbers from head to head."""
    # The copy engine requires that rows start at multiples of 16 bytes.
    return tiles_for(q, block_q, block_k).forward.columns, triton.cdiv(seqlen_k, 4) * 4


def find_hopper(q, k, v, block_q, block_k, *others, **options) -> ModuleType | None:
    """The package of Hopper kernels, or None if :func:`why_portable` gives a reason for the portable ones."""
    if why_portable(q, k, v, block_q, block_k, *others, **options):
        return None
    from . import hopper

    return hopper


def why_portable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_q: int,
    block_k: int,
    *others: Tensor,
    window_size=None,
    portable=False,
    packed=False,
) -> str | None:
    """The reason why the portable kernels run, in one line; None if the Hopper kernels run."""
    refusal = find_refusal(q, k, block_q, block_k, portable)
    if refusal is not None:
        return refusal
    if window_size is not None:
        return f"the kernels for Hopper have no window, and window_size is {window_size}"
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"{q.device} is not an NVIDIA GPU"
    try:
        from . import hopper
    except (ImportError, AttributeError) as error:  # Triton has no Gluon, or a Gluon with other names
        return f"Triton {triton.__version__} has no Gluon that these kernels need ({error})"
    reason = hopper.find_obstacle(q, k, block_q, block_k, packed)
    if reason is None and not can_stream(q, k, v, *others):
        return "the copy engine (TMA) needs rows of 16-bit numbers that start at multiples of 16 bytes"
    return reason


def find_refusal(q: Tensor, k: Tensor, block_q: int, block_k: int, portable: bool = False) -> str | None:
    """The reason why these inputs use the portable kernels on every device, or None."""
    if portable:
        return "implementation='triton-portable' was passed"
    return find_portable_request() or _refused.get(_kernel_key(q, k, block_q, block_k))


def _kernel_key(q: Tensor, k: Tensor, block_q: int, block_k: int) -> tuple:
    """The properties on which a compiled kernel depends; lengths are not among them."""
    return q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1], block_q, block_k


def _try_launch(launch: Callable, given: tuple, key: tuple) -> bool:
    """Whether ``launch`` succeeded: Gluon is experimental, and another version of Triton may fail."""
    try:
        launch(*given)
    except TritonError as error:
        reason = f"Triton {triton.__version__} does not compile the Hopper kernels: {error}"
        _refused[key] = reason
        warnings.warn(f"{reason}; the slower portable kernels run instead", stacklevel=2)
        return False
    return True
