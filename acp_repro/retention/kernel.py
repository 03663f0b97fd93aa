"""The scan of Eq. 3 in two Triton kernels: running summary, tanh and the product with v, for inference.

PyTorch takes some twenty kernels for it; at 512 tokens their launches alone were a sixth of a pruned batch's
time. Every chunk of every example has a program of its own, so that few long texts fill a GPU too: first what
each chunk adds to the summary, then the scores, for which a chunk sums what those before it have left. Sums
have a fixed order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 32
_CHUNKS_AT_ONCE = 32
_NEVER = -1e4  # log2 of a decay of 0: 2^(0 * that) is 1, 2^(1 * that) is 0


@triton.jit
def _counts(kept, i, inside, ALL: tl.constexpr):
    """How often a token decays the summary: once if it is kept."""
    counts = inside.to(tl.float32)
    if not ALL:
        counts *= tl.load(kept + i, mask=inside, other=0).to(tl.float32)
    return counts


@triton.jit(do_not_specialize=["length", "chunks"])
def _ends_kernel(
    parts,
    kept,
    ends,
    totals,
    length,
    chunks,
    log2_decay,
    gain,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ALL: tl.constexpr,
):
    chunk, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w = tl.arange(0, PADDED)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = i < length
    counts = _counts(kept + example * length, i, inside, ALL)
    at = parts + (example * length + i[:, None]) * 2 * WIDTH + WIDTH + w[None, :]
    there = inside[:, None] & (w < WIDTH)[None, :]
    x = gain * tl.load(at, mask=there, other=0.0).to(tl.float32) * counts[:, None]
    total = tl.sum(counts, 0)
    left = tl.exp2((total - tl.cumsum(counts, 0)) * log2_decay)
    place = example * chunks + chunk
    tl.store(ends + place * PADDED + w, tl.sum(left[:, None] * x, 0))
    tl.store(totals + place, total)


@triton.jit(do_not_specialize=["length", "chunks"])
def _scores_kernel(
    parts,
    kept,
    ends,
    totals,
    v,
    bias,
    scores,
    length,
    chunks,
    log2_decay,
    gain,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ALL: tl.constexpr,
):
    chunk, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w = tl.arange(0, PADDED)
    has_w = w < WIDTH
    # What the chunks before this one have left.
    carry = tl.zeros([PADDED], dtype=tl.float32)
    for first in range(0, chunk, AT_ONCE):
        c = first + tl.arange(0, AT_ONCE)
        earlier = c < chunk
        place = example * chunks + c
        counted = tl.load(totals + place, mask=earlier, other=0.0)
        end = tl.load(ends + place[:, None] * PADDED + w[None, :], mask=earlier[:, None], other=0.0)
        all_of_them = tl.sum(counted, 0)
        left = tl.exp2((all_of_them - tl.cumsum(counted, 0)) * log2_decay)
        carry = tl.exp2(all_of_them * log2_decay) * carry + tl.sum(left[:, None] * end, 0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = i < length
    there = inside[:, None] & has_w[None, :]
    at = parts + (example * length + i[:, None]) * 2 * WIDTH + w[None, :]
    local_part = tl.load(at, mask=there, other=0.0).to(tl.float32)
    global_part = tl.load(at + WIDTH, mask=there, other=0.0).to(tl.float32)
    counts = _counts(kept + example * length, i, inside, ALL)
    # How often the summary was decayed up to a token: once for each that is kept.
    upto = tl.cumsum(counts, 0)
    before = upto - counts
    x = gain * global_part * counts[:, None]
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    steps = before[:, None] - upto[None, :]
    decayed = tl.where(row > column, tl.exp2(tl.maximum(steps, 0.0) * log2_decay), 0.0)
    summary = tl.dot(decayed, x, input_precision="ieee")
    summary += tl.exp2(before * log2_decay)[:, None] * carry[None, :]
    activity = 2 * tl.sigmoid(2 * (local_part + summary)) - 1  # tanh
    weight = tl.load(v + w, mask=has_w, other=0.0).to(tl.float32)
    score = tl.sum(activity * weight[None, :], 1) + tl.load(bias).to(tl.float32)
    tl.store(scores + example * length + i, score, mask=inside)


def scan(parts: Tensor, kept: Tensor | None, decay: float, v: Tensor, bias: Tensor) -> Tensor:
    """(B, T) float32: v' tanh(local + summary of global before t) + bias.

    Args:
        parts: (B, T, 2 W), W h_t and then U h_t, contiguous, of any floating dtype.
        kept: (B, T) bool, what the summary runs over; None for all.
        v: (W,), bias: (1,).
    """
    batch, length, twice = parts.shape
    width = twice // 2
    chunks, padded = triton.cdiv(length, _CHUNK), max(16, triton.next_power_of_2(width))
    scores = torch.empty(batch, length, device=parts.device, dtype=torch.float32)
    ends = scores.new_empty(batch, chunks, padded + 1)  # and in the same memory the tokens counted
    totals = ends.view(-1)[batch * chunks * padded :]
    numbers = (length, chunks, math.log2(decay) if decay > 0 else _NEVER, 1 - decay)
    sizes = {"WIDTH": width, "PADDED": padded, "CHUNK": _CHUNK, "ALL": kept is None}
    kept = scores if kept is None else kept.contiguous().view(torch.uint8)
    with torch.cuda.device_of(parts):
        if chunks > 1:
            _ends_kernel[(chunks, batch)](parts, kept, ends, totals, *numbers, **sizes)
        _scores_kernel[(chunks, batch)](
            parts, kept, ends, totals, v, bias, scores, *numbers, AT_ONCE=_CHUNKS_AT_ONCE, **sizes
        )
    return scores
