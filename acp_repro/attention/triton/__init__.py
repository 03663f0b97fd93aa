"""Forgetting attention on any GPU that Triton supports; Hopper has a backward of its own.

The functions below are the whole interface. :func:`forward_pass` and :func:`backward_pass` are the two passes
as the operator takes them: every launch of each is kept ready for the next call. The last argument of each
holds constants: the scale of scores; (block_q, block_k), the pruning grid; how many keys a query sees, or
None; and for the forward pass whether lse and c are wanted, and delta where it is one number.
"""

from __future__ import annotations

import torch

from .backward import backward, find_refusal, sum_of_shares, why_portable
from .decode import decode
from .forward import forward, terms_layout
from .gates import cumulative_log_fgate, find_boundary, log_fgate_grad, read_gates
from .launch import only_portable, repeat_launches
from .norms import threshold_from_norms
from .paged_write import write_blocks, write_kvcache
from .tiles import block_sizes, can_stream, is_streamable, make_addressable

__all__ = [
    "backward",
    "backward_pass",
    "block_sizes",
    "cumulative_log_fgate",
    "decode",
    "find_boundary",
    "forward",
    "forward_pass",
    "log_fgate_grad",
    "only_portable",
    "repeat_launches",
    "threshold_from_norms",
    "why_portable",
    "write_blocks",
    "write_kvcache",
]


@repeat_launches
def forward_pass(q, k, v, log_fgate, threshold, seq_start, constants):
    """Output, lse (B, H, Tq) float32 and c (B, H, Tk) float64 or None, and boundary (B, H, M) int32."""
    sm_scale, grid, window_size, for_backward, delta = constants
    seq_start = seq_start if seq_start is None else seq_start.contiguous()  # the kernels know no stride of it
    # The search of a pass that prunes nothing writes zeros, which costs no more than filling them in.
    layout, delta = terms_layout(q, k, *grid), threshold if delta is None else delta
    c, terms, boundary = read_gates(log_fgate, None, layout, grid, q.shape[2], delta, seq_start, window_size)
    out, lse = forward(q, k, v, c, boundary, seq_start, sm_scale, *grid, window_size, terms)
    return (out, lse, c, boundary) if for_backward else (out, None, None, boundary)


def backward_pass(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants):
    """Gradients of out with respect to q, k, v and log_fgate, each like these; the last is contiguous."""
    dout = make_addressable(
        dout
    )  # here and not where launches are noted, which a copy would keep from repeating
    if not is_streamable(dout) and can_stream(q, k, v):
        # Of a mean over tokens all rows lie in one place, of a slice they may start anywhere. A copy takes
        # less time than the kernels that would read it as it is.
        dout = dout.clone(memory_format=torch.contiguous_format)
    constants = (*constants, find_refusal(q, k, *constants[1]))
    dq, dk, dv, grad = _backward(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants)
    return dq, sum_of_shares(dk, k), sum_of_shares(dv, v), grad


@repeat_launches
def _backward(dout, q, k, v, log_fgate, out, lse, c, boundary, seq_start, constants):
    sm_scale, grid, window_size, _ = constants
    seq_start = seq_start if seq_start is None else seq_start.contiguous()
    dq, dk, dv, dc = backward(dout, q, k, v, out, lse, c, boundary, seq_start, sm_scale, *grid, window_size)
    return dq, dk, dv, log_fgate_grad(dc, log_fgate)
