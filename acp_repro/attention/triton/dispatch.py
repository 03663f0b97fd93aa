"""The dispatch of both passes: the kernels for Hopper where they serve a call, else the portable ones.

:func:`forward_pass` and :func:`backward_pass` are the two passes as the operator calls them; their
launches are recorded and repeated. Their last argument contains constants: the scale of scores; (block_q,
block_k), the pruning grid; how many keys a query sees, or None; whether only portable kernels may run; and
for the forward pass whether lse and c are wanted, and delta where it is one number.
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

# The Hopper forward computes tiles of this many queries and keys.
_HOPPER_TILE = (128, 64)
# Why the Hopper kernels are not called again for such inputs, once Triton could not compile them.
_refused: dict[tuple, str] = {}


@repeat_launches
def forward_pass(q, k, v, log_fgate, threshold, seq_start, constants):
    """Output, lse (B, H, Tq) float32 and c (B, H, Tk) float64 or None, and boundary (B, H, M) int32."""
    sm_scale, grid, window_size, portable, for_backward, delta = constants
    seq_start = seq_start if seq_start is None else seq_start.contiguous()  # the kernels know no stride of it
    # The search of a pass that prunes nothing writes zeros, which costs no more than filling them in.
    layout, delta = terms_layout(q, k, *grid), threshold if delta is None else delta
    c, terms, boundary = read_gates(log_fgate, None, layout, grid, q.shape[2], delta, seq_start, window_size)
    out, lse = forward(q, k, v, c, boundary, seq_start, sm_scale, *grid, window_size, terms, portable)
    return (out, lse, c, boundary) if for_backward else (out, None, None, boundary)


def backward_pass(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants):
    """Gradients of out with respect to q, k, v and log_fgate, each like these; the last is contiguous."""
    # Here and not where launches are recorded, because a copy would keep them from being repeated.
    dout = make_addressable(dout)
    if not is_streamable(dout) and can_stream(q, k, v):
        # Of a mean over tokens all rows lie in one place, of a slice they may start anywhere. A copy takes
        # less time than the kernels that would read it as it is.
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
    """The gradient of ``like`` (B, Hkv, Tk, D) from its shares (B, H, Tk, D), summed in a fixed order."""
    if shares.shape[1] == like.shape[1]:
        return shares
    return torch.empty_like(like).copy_(shares.unflatten(1, (like.shape[1], -1)).sum(2))


def forward(
    q, k, v, c, boundary, seq_start, sm_scale, block_q, block_k, window_size=None, terms=None, portable=False
) -> tuple[Tensor, Tensor]:
    """``O = softmax(sm_scale Q K^T + D) V`` over the kept blocks of the causal grid.

    q, k, v, seq_start and window_size are those of :class:`..checks.AttentionCall`, c is (B, H, Tk) float64.
    boundary (B, H, M) int32 does not fall from one query block to the next; None keeps every block. terms are
    those of c for :func:`terms_layout`, if they are there already. portable excludes the kernels for Hopper.

    Returns:
        out like q, and lse (B, H, Tq) float32, the log to base 2 of each row's sum: as the backward pass
        wants it, and a change of base would round it once each way. A row with no key left has out 0 and
        lse -inf.
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tile = tiles_for(q, block_q, block_k).forward
    if terms is None:
        terms = decay_terms(c.contiguous(), seq_start, *terms_layout(q, k, block_q, block_k))
    q, k, v = (make_addressable(x) for x in (q, k, v))
    boundary = None if boundary is None else boundary.contiguous()
    rows = allocate_rows(out)
    given = (q, k, v, rows, lse, terms, boundary, seq_start, sm_scale, block_q, block_k)
    recompute_tiles = None
    hopper = find_hopper(q, k, v, block_q, block_k, window_size=window_size, portable=portable)
    # At 64 dimensions the portable kernel took less time on an H200, at 4k to 16k
    # (docs/lab-notebook/attention-kernels.md).
    if hopper is not None and q.shape[3] == 128 and tile[:2] == _HOPPER_TILE:
        marks = lse.new_empty((*q.shape[:2], triton.cdiv(q.shape[2], tile.rows), 2), dtype=torch.int32)
        if _try_launch(hopper.launch_forward, (*given, marks), _kernel_key(q, k, block_q, block_k)):
            recompute_tiles = marks
    launch_forward(*given, tile, window_size, recompute_tiles)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv and dc (B, H, Tk) float32 of :func:`forward` over the same kept blocks.

    Where query heads share keys, or with ``shares``, dk and dv are shares: (B, H, Tk, D) float32, what each
    query head adds. It only allocates and launches, see :mod:`.launch`.
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
    hopper = find_hopper(q, k, v, block_q, block_k, dout, window_size=window_size, portable=portable)
    if hopper is None or not _try_launch(hopper.launch_backward, given, _kernel_key(q, k, block_q, block_k)):
        launch_backward(*given, tiles_for(q, block_q, block_k), window_size)
    for wanted, grad in zip((dq, dk, dv), grads, strict=True):
        if wanted is not grad:
            wanted.copy_(grad)
    return dq, dk, dv, dc


def terms_layout(q, k, block_q, block_k) -> tuple[int, int]:
    """For which key tiles :func:`forward` takes the terms of c, and how far its heads are apart."""
    # Rows of the pairs start at multiples of 16 bytes, as the copy engine wants them.
    return tiles_for(q, block_q, block_k).forward.columns, triton.cdiv(k.shape[2], 4) * 4


def find_hopper(q, k, v, block_q, block_k, *others, window_size=None, portable=False) -> ModuleType | None:
    """The package of kernels for Hopper, or None if :func:`why_portable` has a reason against it."""
    if why_portable(q, k, v, block_q, block_k, *others, window_size=window_size, portable=portable):
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
) -> str | None:
    """Why the portable kernels run, in one line; None: there are faster ones."""
    refusal = find_refusal(q, k, block_q, block_k, portable)
    if refusal is not None:
        return refusal
    if window_size is not None:
        return f"the kernels for Hopper have no window, and window_size is {window_size}"
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"{q.device} is not an NVIDIA GPU"
    try:
        from . import hopper
    except (ImportError, AttributeError) as error:  # a Triton without Gluon, or with one of other names
        return f"Triton {triton.__version__} has no Gluon that these kernels need ({error})"
    reason = hopper.find_obstacle(q, k, block_q, block_k)
    if reason is None and not can_stream(q, k, v, *others):
        return "the copy engine (TMA) needs rows of 16-bit numbers that start at multiples of 16 bytes"
    return reason


def find_refusal(q: Tensor, k: Tensor, block_q: int, block_k: int, portable: bool = False) -> str | None:
    """Why such inputs are kept to the portable kernels on every device; None: they are not."""
    if portable:
        return "implementation='triton-portable' was passed"
    return find_portable_request() or _refused.get(_kernel_key(q, k, block_q, block_k))


def _kernel_key(q: Tensor, k: Tensor, block_q: int, block_k: int) -> tuple:
    """What a compiled kernel depends on, whatever the lengths."""
    return q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1], block_q, block_k


def _try_launch(launch: Callable, given: tuple, key: tuple) -> bool:
    """Whether ``launch`` ran: Gluon is experimental, and a Triton of another version may refuse it."""
    try:
        launch(*given)
    except TritonError as error:
        reason = f"Triton {triton.__version__} does not compile the Hopper kernels: {error}"
        _refused[key] = reason
        warnings.warn(f"{reason}; the slower portable kernels run instead", stacklevel=2)
        return False
    return True
