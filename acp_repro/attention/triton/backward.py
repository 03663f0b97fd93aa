"""The backward kernels: a query side (dQ, delta) and a key side (dK, dV, column sums of dS).

    P = exp(S - log sum exp S),  dP = dO V^T,  dS = P * (dP - delta),  delta_i = sum_d dO_id O_id
    dQ = sm_scale dS K,  dK = sm_scale dS^T Q,  dV = P^T dO,  dc_j = -sum_i dS_ij

Each side computes the scores again. That costs two products more than one fused kernel, and buys
sums in a fixed order: the same inputs give the same bits.

In exact arithmetic the row sums of dS are 0. In bfloat16 delta comes of a rounded output, and a row's sum is
what delta lacks, as the weights of a row sum to 1. The gradient of a gate sums thousands of such residues. So
the query side adds each row's sum to the delta that the key side takes, over the same entries.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from .gates import decay_terms
from .key_side import key_side_kernel
from .launch import find_portable_request, launch
from .query_side import query_side_kernel
from .tiles import (
    GROUP,
    LOG2E,
    Tiles,
    allocate_rows,
    can_stream,
    describe_stream,
    make_addressable,
    padded_head_dim,
    tiles_for,
)


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
    shares=False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv and dc (B, H, Tk) float32 of :func:`.forward.forward` over the same kept blocks.

    Where query heads share keys, or with ``shares``, dk and dv are shares: (B, H, Tk, D) float32, what each
    query head adds, for :func:`sum_of_shares`. So far it only allocates and launches, see :mod:`.launch`.
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
    faster = faster_launch(dout, q, k, v, block_q, block_k, window_size)
    if faster is None or not try_launch(faster, given, kernel_key(q, k, block_q, block_k)):
        launch_backward(*given, tiles_for(q, block_q, block_k), window_size=window_size)
    for wanted, grad in zip((dq, dk, dv), grads, strict=True):
        if wanted is not grad:
            wanted.copy_(grad)
    return dq, dk, dv, dc


def sum_of_shares(shares: Tensor, like: Tensor) -> Tensor:
    """The gradient of ``like`` (B, Hkv, Tk, D) from its shares (B, H, Tk, D), summed in a fixed order."""
    if shares.shape[1] == like.shape[1]:
        return shares
    return torch.empty_like(like).copy_(shares.unflatten(1, (like.shape[1], -1)).sum(2))


# Why the kernels of another module are not called again for such inputs, once Triton could not compile them.
_refused: dict[tuple, str] = {}


def faster_launch(dout, q, k, v, block_q, block_k, window_size=None) -> Callable | None:
    """What to call in place of :func:`launch_backward`, if kernels for just this device and shape exist."""
    if why_portable(q, k, v, block_q, block_k, dout, window_size=window_size):
        return None
    from . import hopper

    return hopper.launch_backward


def why_portable(
    q: Tensor, k: Tensor, v: Tensor, block_q: int, block_k: int, *others: Tensor, window_size=None
) -> str | None:
    """Why the kernels of this module run, in one line; None: there are faster ones."""
    kept = find_refusal(q, k, block_q, block_k)
    if kept is not None:
        return kept
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


def find_refusal(q: Tensor, k: Tensor, block_q: int, block_k: int) -> str | None:
    """Why such inputs are kept to the kernels of this module on every device; None: they are not."""
    return find_portable_request() or _refused.get(kernel_key(q, k, block_q, block_k))


def kernel_key(q: Tensor, k: Tensor, block_q: int, block_k: int) -> tuple:
    """What a compiled kernel depends on, whatever the lengths."""
    return q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1], block_q, block_k


def try_launch(faster: Callable, given: tuple, shape: tuple) -> bool:
    """Whether ``faster`` ran: Gluon is experimental, and a Triton of another version may refuse it."""
    try:
        faster(*given)
    except TritonError as error:
        reason = f"Triton {triton.__version__} does not compile the Hopper kernels: {error}"
        _refused[shape] = reason
        warnings.warn(f"{reason}; the slower portable kernels run instead", stacklevel=2)
        return False
    return True


def launch_backward(
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
    dq,
    dk,
    dv,
    dc,
    tiles: Tiles,
    descriptors: bool | None = None,
    window_size: int | None = None,
) -> None:
    """:func:`backward` into given tensors, which are addressable; dk and dv have a head for each of q."""
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    _, query, key = tiles
    if descriptors is None:
        descriptors = can_stream(q, k, v, dout)
    common = {
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "D": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "SHARED": heads // k.shape[1],
        "DESCRIPTORS": descriptors,
    }
    row_blocks = triton.cdiv(seqlen_q, block_q)
    row_tiles = triton.cdiv(seqlen_q, query.rows)
    scale = sm_scale * LOG2E.value
    levels, queries = torch.empty((2, *lse.shape), dtype=torch.int64, device=q.device)
    terms = decay_terms(c, seq_start, query.columns)
    launch(
        query_side_kernel,
        (row_tiles * batch * heads,),
        q,
        describe_stream(k, query.columns, descriptors),
        describe_stream(v, query.columns, descriptors),
        out,
        dout,
        lse,
        dq,
        levels,
        queries,
        *terms,
        boundary,
        seq_start,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *dout.stride()[:3],
        *dq.stride()[:3],
        batch * heads,
        heads,
        GROUP,
        seqlen_q,
        seqlen_k,
        row_tiles,
        row_blocks,
        key.rows,
        window_size,
        scale,
        sm_scale,
        ROWS=query.rows,
        COLUMNS=query.columns,
        **common,
        **query.options(q.device),
    )
    launch(
        key_side_kernel,
        (triton.cdiv(seqlen_k, key.columns) * batch * heads,),
        describe_stream(q, key.rows, descriptors),
        k,
        v,
        describe_stream(dout, key.rows, descriptors),
        dk,
        dv,
        dc,
        levels,
        queries,
        terms.pairs,
        boundary,
        seq_start,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dout.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        batch * heads,
        heads,
        GROUP,
        seqlen_q,
        seqlen_k,
        row_blocks,
        window_size,
        scale,
        sm_scale,
        ROWS=key.rows,
        COLUMNS=key.columns,
        RAGGED=seqlen_q % key.rows != 0,
        COUNT=256,
        **common,
        **key.options(q.device),
    )
