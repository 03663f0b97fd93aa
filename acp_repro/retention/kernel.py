"""The scan of Eq. 3 in one Triton kernel: running summary, tanh and the product with v, for inference.

PyTorch takes some twenty kernels for it; at 512 tokens their launches alone were a sixth of a pruned batch's
time. One program an example, chunk after chunk, so that sums have a fixed order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 32
_NEVER = -1e4  # log2 of a decay of 0: 2^(0 * that) is 1, 2^(1 * that) is 0


@triton.jit(do_not_specialize=["length"])
def _scan_kernel(
    parts,
    kept,
    v,
    bias,
    scores,
    length,
    log2_decay,
    gain,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ALL: tl.constexpr,
):
    example = tl.program_id(0).to(tl.int64)
    parts += example * length * 2 * WIDTH
    kept += example * length
    scores += example * length
    w = tl.arange(0, PADDED)
    has_w = w < WIDTH
    weight = tl.load(v + w, mask=has_w, other=0.0).to(tl.float32)
    offset = tl.load(bias).to(tl.float32)
    carry = tl.zeros([PADDED], dtype=tl.float32)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    for first in range(0, length, CHUNK):
        i = first + tl.arange(0, CHUNK)
        inside = i < length
        there = inside[:, None] & has_w[None, :]
        at = parts + i[:, None].to(tl.int64) * 2 * WIDTH + w[None, :]
        local_part = tl.load(at, mask=there, other=0.0).to(tl.float32)
        global_part = tl.load(at + WIDTH, mask=there, other=0.0).to(tl.float32)
        counts = inside.to(tl.float32)
        if not ALL:
            counts *= tl.load(kept + i, mask=inside, other=0).to(tl.float32)
        # How often the summary was decayed up to a token: once for each that is kept.
        upto = tl.cumsum(counts, 0)
        before = upto - counts
        x = gain * global_part * counts[:, None]
        steps = before[:, None] - upto[None, :]
        decayed = tl.where(row > column, tl.exp2(tl.maximum(steps, 0.0) * log2_decay), 0.0)
        summary = tl.dot(decayed, x, input_precision="ieee")
        summary += tl.exp2(before * log2_decay)[:, None] * carry[None, :]
        activity = 2 * tl.sigmoid(2 * (local_part + summary)) - 1  # tanh
        tl.store(scores + i, tl.sum(activity * weight[None, :], 1) + offset, mask=inside)
        total = tl.sum(counts, 0)
        left = tl.exp2((total - upto) * log2_decay)
        carry = tl.exp2(total * log2_decay) * carry + tl.sum(left[:, None] * x, 0)


def scan(parts: Tensor, kept: Tensor | None, decay: float, v: Tensor, bias: Tensor) -> Tensor:
    """(B, T) float32: v' tanh(local + summary of global before t) + bias.

    Args:
        parts: (B, T, 2 W), W h_t and then U h_t, contiguous, of any floating dtype.
        kept: (B, T) bool, what the summary runs over; None for all.
        v: (W,), bias: (1,).
    """
    batch, length, twice = parts.shape
    width = twice // 2
    scores = torch.empty(batch, length, device=parts.device, dtype=torch.float32)
    with torch.cuda.device_of(parts):
        _scan_kernel[(batch,)](
            parts,
            scores if kept is None else kept.contiguous().view(torch.uint8),
            v,
            bias,
            scores,
            length,
            math.log2(decay) if decay > 0 else _NEVER,
            1 - decay,
            WIDTH=width,
            PADDED=max(16, triton.next_power_of_2(width)),
            CHUNK=_CHUNK,
            ALL=kept is None,
        )
    return scores
