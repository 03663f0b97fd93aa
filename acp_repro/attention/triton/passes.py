"""The two passes of a call as the operator takes them: every launch of each, kept ready for the next call."""

from __future__ import annotations

import torch
from torch import Tensor

from .backward import backward_shares, kept_portable, sum_of_shares
from .forward import forward
from .gates import cumulative_log_fgate, log_fgate_grad
from .launch import ready
from .search import find_boundary
from .tiles import addressable, can_stream, is_streamable


def forward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    threshold: Tensor | None,
    seq_start: Tensor | None,
    sm_scale: float,
    block_q: int,
    block_k: int,
    for_backward: bool = True,
    window_size: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Running sum, boundary and output.

    Args:
        q: (B, H, Tq, D). k, v: (B, Hkv, Tk, D). Any strides.
        log_fgate: (B, H, Tk) float32. threshold: (B, H) float32 or None. seq_start: (B,) int64 or None.
        block_q, block_k: the pruning grid.
        for_backward: whether lse and c are wanted.
        window_size: keys that a query sees, itself included; None is no window.

    Returns:
        out like q; lse (B, H, Tq) float32 and c (B, H, Tk) float64, or None; boundary (B, H, M) int32.
    """
    seq_start = seq_start if seq_start is None else seq_start.contiguous()  # the kernels know no stride of it
    constants = (sm_scale, block_q, block_k, for_backward, window_size)
    return _forward(q, k, v, log_fgate, threshold, seq_start, constants)


@ready
def _forward(q, k, v, log_fgate, threshold, seq_start, constants):
    sm_scale, block_q, block_k, for_backward, window_size = constants
    c = cumulative_log_fgate(log_fgate)
    # The search of a pass that prunes nothing writes zeros, which costs no more than filling them in.
    boundary = find_boundary(c, threshold, q.shape[2], block_q, block_k, seq_start, window_size)
    out, lse = forward(q, k, v, c, boundary, seq_start, sm_scale, block_q, block_k, window_size)
    return (out, lse, c, boundary) if for_backward else (out, None, None, boundary)


def backward_pass(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    out: Tensor,
    lse: Tensor,
    c: Tensor,
    boundary: Tensor,
    seq_start: Tensor | None,
    sm_scale: float,
    block_q: int,
    block_k: int,
    window_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of out with respect to q, k, v and log_fgate, each like what it is the gradient of but for
    the last, which is contiguous. dout: (B, H, Tq, D), any strides; the rest as in :func:`forward_pass`."""
    seq_start = seq_start if seq_start is None else seq_start.contiguous()
    dout = addressable(dout)  # here and not where launches are noted, which a copy would keep from repeating
    if not is_streamable(dout) and can_stream(q, k, v):
        # Of a mean over tokens all rows lie in one place, of a slice they may start anywhere. A copy takes
        # less time than the kernels that would read it as it is.
        dout = dout.clone(memory_format=torch.contiguous_format)
    constants = (sm_scale, block_q, block_k, window_size, kept_portable(q, k, block_q, block_k))
    dq, dk, dv, grad = _backward(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants)
    return dq, sum_of_shares(dk, k), sum_of_shares(dv, v), grad


@ready
def _backward(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants):
    given = (dout, q, k, v, out, lse, c, boundary, seq_start, *constants[:4])
    dq, dk, dv, dc = backward_shares(*given)
    return dq, dk, dv, log_fgate_grad(dc, log_fgate)
