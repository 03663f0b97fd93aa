"""Both passes for Hopper GPUs, in Gluon: matrix products overlap with exponentials.

Triton waits for the scores of a tile before it continues. In these kernels, one warp prefetches tiles, and
the four computing warps issue the product for the next scores before they have finished the current tile,
which keeps the tensor cores busy. With wide heads, the accumulators of the key side leave no registers for a
second score tile; there, the second program of the multiprocessor supplies the products. The results are
those of :mod:`..backward`, whose kernels support all other devices and shapes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..differences import DecayTerms
from ..gates import decay_terms
from ..launch import launch
from ..tiles import HEAD_GROUP, LOG2E, outer_strides, room_for, strides_of
from .forward import forward_kernel
from .key_side import key_side_kernel
from .query_side import query_side_kernel

ROWS = 64  # queries and keys in a tile: two accumulators and two score tiles fill the registers
# maxnreg lets two programs share a multiprocessor. The computing warps then take over registers of the
# copying warp.
_OPTIONS = {"num_warps": 4, "maxnreg": 128}
# Prefetched tiles of the query side and of the key side, by head_dim; two programs share 228 KB.
_STAGES = {64: (4, 4), 128: (3, 2)}
_FORWARD_STAGES = 5  # one program uses all of the shared memory


def find_obstacle(q: Tensor, k: Tensor, block_q: int, block_k: int, packed=False) -> str | None:
    """The reason why these kernels cannot run on inputs that the bulk copy engine can read, or None."""
    if torch.cuda.get_device_capability(q.device)[0] != 9:
        return "the GPU is not a Hopper"
    head_dim = q.shape[-1]
    if head_dim not in _STAGES:
        return f"head_dim is {head_dim}, not 64 or 128"
    if q.shape[2] != k.shape[2] and not packed:
        return "there are more keys than queries"
    if block_q % ROWS or block_k % ROWS:
        return f"the grid of {block_q} by {block_k} is not one of multiples of {ROWS}"
    return None


def _describe_rows(*tensors: Tensor) -> list[TensorDescriptor]:
    """Descriptors with which the copy engine reads tiles of tensors (B, H, T, D) of one dtype and width."""
    box = [1, 1, ROWS, tensors[0].shape[3]]
    element = gl.bfloat16 if tensors[0].dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(box, element)
    return [TensorDescriptor(x, list(x.shape), [*outer_strides(x), 1], box, layout) for x in tensors]


def _describe_tail(terms: DecayTerms) -> TensorDescriptor:
    return TensorDescriptor(terms.tail, [terms.tail.numel()], [1], [ROWS], gl.NVMMASharedLayout(0, 32, 1))


def launch_forward(
    q, k, v, out, lse, terms, boundary, seq_start, sm_scale, block_q, block_k, recompute_tiles, packed=None
) -> None:
    """:func:`..forward.launch_forward` for inputs without an obstacle (`find_obstacle`).

    ``terms`` are for tiles of 64 keys, with a multiple of four numbers from head to head. ``recompute_tiles``
    (B, H, tiles of 128 queries, 2) int32 is nonzero for tiles that the portable kernel must recompute.
    """
    batch, heads, seqlen, head_dim = q.shape
    launch(
        forward_kernel,
        (recompute_tiles.numel() // 2,),
        *_describe_rows(q, k, v),
        _describe_tail(terms),
        out,
        lse,
        recompute_tiles,
        terms.pairs,
        boundary,
        seq_start,
        packed,
        strides_of(out),
        batch * heads,
        heads,
        HEAD_GROUP,
        seqlen,
        seqlen if packed is None else terms.pairs.shape[2],
        terms.pairs.shape[2],
        triton.cdiv(seqlen, block_q),
        sm_scale * LOG2E.value,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        ROWS=ROWS,
        D=head_dim,
        SHARED=heads // k.shape[1],
        STAGES=_FORWARD_STAGES,
        ROOM=room_for(q, sm_scale),
        num_warps=4,
        maxnreg=168,
    )


def launch_backward(
    dout, q, k, v, out, lse, c, boundary, seq_start, sm_scale, block_q, block_k, dq, dk, dv, dc, packed=None
) -> None:
    """:func:`..backward.launch_backward` for inputs without an obstacle (`find_obstacle`)."""
    batch, heads, seqlen, head_dim = q.shape
    seqlen_k = c.shape[2]
    # The padded lengths: the copy engine requires rows that start at multiples of 16 bytes, which are four
    # numbers. The padding is never read.
    padded_q, padded = (triton.cdiv(x, 4) * 4 for x in (seqlen, seqlen_k))
    levels, queries = torch.empty((2, batch, heads, padded_q), dtype=torch.int64, device=q.device)
    terms = decay_terms(c, seq_start, ROWS, padded)
    described, tail = _describe_rows(q, k, v, dout), _describe_tail(terms)

    def numbers_of(x, length):
        x = x.view(torch.int32).view(batch * heads, -1)
        flat = gl.NVMMASharedLayout(0, 32, 2)
        return TensorDescriptor(x, [batch * heads, 2 * length], [x.shape[1], 1], [1, 2 * ROWS], flat)

    query_stages, key_stages = _STAGES[head_dim]
    sizes = batch * heads, heads, HEAD_GROUP, seqlen, seqlen_k
    row_blocks = triton.cdiv(seqlen, block_q)
    # Packed keys are one matrix, which all batch rows share.
    shares = (strides_of(x) if packed is None else strides_of(x)._replace(batch=0) for x in (dk, dv))
    scale = sm_scale * LOG2E.value
    common = {
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "ROWS": ROWS,
        "D": head_dim,
        "SHARED": heads // k.shape[1],
        **_OPTIONS,
    }
    launch(
        query_side_kernel,
        (triton.cdiv(seqlen, ROWS) * batch * heads,),
        *described,
        tail,
        out,
        lse,
        dq,
        levels,
        queries,
        terms.pairs,
        boundary,
        seq_start,
        packed,
        *map(strides_of, (out, dq)),
        *sizes,
        padded_q,
        padded,
        row_blocks,
        scale,
        sm_scale,
        STAGES=query_stages,
        **common,
    )
    launch(
        key_side_kernel,
        (triton.cdiv(seqlen_k, ROWS) * batch * heads,),
        *described,
        numbers_of(queries, seqlen),
        numbers_of(levels, seqlen),
        numbers_of(terms.pairs, seqlen_k),
        dk,
        dv,
        dc,
        terms.pairs,
        boundary,
        seq_start,
        packed,
        *shares,
        *sizes,
        padded,
        row_blocks,
        scale,
        sm_scale,
        COUNT=256,
        STAGES=key_stages,
        **common,
    )
