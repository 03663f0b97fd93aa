"""The scan of Eq. 3 (running summary, tanh, product with v): two Triton kernels forward and two backward.

PyTorch needs about twenty kernels for the scan. At 512 tokens their launches alone took a sixth of a pruned
batch's time. Every chunk of every example has its own program, so that a few long texts also fill a GPU. The
first kernel computes each chunk's contribution to the summary. The second sums the contributions of all
earlier chunks and computes the scores. All sums have a fixed order.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 32
_CHUNKS_AT_ONCE = 32
_NEVER = -1e4  # log2 of a decay of 0: 2^(0 * that) is 1, 2^(1 * that) is 0


@triton.jit
def _tokens(kept, length, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, ALL: tl.constexpr):
    """A program's tokens i and columns w, their bounds masks, and each token's decay count: 1 if kept."""
    chunk, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    w, i = tl.arange(0, PADDED), chunk * CHUNK + tl.arange(0, CHUNK)
    inside = i < length
    counts = inside.to(tl.float32)
    if not ALL:
        counts *= tl.load(kept + example * length + i, mask=inside, other=0).to(tl.float32)
    return chunk, example, i, w, inside, inside[:, None] & (w < WIDTH)[None, :], counts


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
    chunk, example, i, w, inside, there, counts = _tokens(kept, length, WIDTH, PADDED, CHUNK, ALL)
    at = parts + (example * length + i[:, None]) * 2 * WIDTH + WIDTH + w[None, :]
    x = gain * tl.load(at, mask=there, other=0.0).to(tl.float32) * counts[:, None]
    total = tl.sum(counts, 0)
    left = tl.exp2((total - tl.cumsum(counts, 0)) * log2_decay)
    place = example * chunks + chunk
    tl.store(ends + place * PADDED + w, tl.sum(left[:, None] * x, 0))
    tl.store(totals + place, total)


@triton.jit
def _carried(ends, totals, first, last, w, log2_decay, PADDED: tl.constexpr, AT_ONCE: tl.constexpr):
    """The summary after chunk ``last - 1``: the sum of the decayed contributions of chunks from ``first``."""
    carry = tl.zeros([PADDED], dtype=tl.float32)
    for at in range(first, last, AT_ONCE):
        c = at + tl.arange(0, AT_ONCE)
        there = c < last
        counted = tl.load(totals + c, mask=there, other=0.0)
        end = tl.load(ends + c[:, None] * PADDED + w[None, :], mask=there[:, None], other=0.0)
        all_of_them = tl.sum(counted, 0)
        left = tl.exp2((all_of_them - tl.cumsum(counted, 0)) * log2_decay)
        carry = tl.exp2(all_of_them * log2_decay) * carry + tl.sum(left[:, None] * end, 0)
    return carry


@triton.jit
def _decayed(counts, log2_decay, CHUNK: tl.constexpr):
    """(CHUNK, CHUNK): the decayed weight of a token (column) in the score of a later token (row)."""
    upto = tl.cumsum(counts, 0)
    steps = (upto - counts)[:, None] - upto[None, :]
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.where(row > column, tl.exp2(tl.maximum(steps, 0.0) * log2_decay), 0.0)


@triton.jit
def _activity(
    parts,
    ends,
    totals,
    example,
    chunk,
    chunks,
    length,
    i,
    there,
    counts,
    w,
    log2_decay,
    gain,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """(CHUNK, PADDED): tanh(W h + U m) of a chunk's tokens."""
    of_example = example * chunks
    carry = _carried(
        ends + of_example * PADDED, totals + of_example, 0, chunk, w, log2_decay, PADDED, AT_ONCE
    )
    at = parts + (example * length + i[:, None]) * 2 * WIDTH + w[None, :]
    local_part = tl.load(at, mask=there, other=0.0).to(tl.float32)
    global_part = tl.load(at + WIDTH, mask=there, other=0.0).to(tl.float32)
    x = gain * global_part * counts[:, None]
    summary = tl.dot(_decayed(counts, log2_decay, CHUNK), x, input_precision="ieee")
    before = tl.cumsum(counts, 0) - counts  # number of decays before a token
    summary += tl.exp2(before * log2_decay)[:, None] * carry[None, :]
    return 2 * tl.sigmoid(2 * (local_part + summary)) - 1


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
    chunk, example, i, w, inside, there, counts = _tokens(kept, length, WIDTH, PADDED, CHUNK, ALL)
    activity = _activity(
        parts, ends, totals, example, chunk, chunks, length, i, there, counts, w, log2_decay, gain,
        WIDTH, PADDED, CHUNK, AT_ONCE,
    )  # fmt: skip
    weight = tl.load(v + w, mask=w < WIDTH, other=0.0).to(tl.float32)
    score = tl.sum(activity * weight[None, :], 1) + tl.load(bias).to(tl.float32)
    tl.store(scores + example * length + i, score, mask=inside)


@triton.jit(do_not_specialize=["length", "chunks"])
def _inner_gradient_kernel(
    parts,
    kept,
    ends,
    totals,
    v,
    grad_scores,
    inner,
    starts,
    grad_v,
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
    """The gradient before tanh, and the gradient that each chunk propagates to all earlier tokens."""
    chunk, example, i, w, inside, there, counts = _tokens(kept, length, WIDTH, PADDED, CHUNK, ALL)
    activity = _activity(
        parts, ends, totals, example, chunk, chunks, length, i, there, counts, w, log2_decay, gain,
        WIDTH, PADDED, CHUNK, AT_ONCE,
    )  # fmt: skip
    weight = tl.load(v + w, mask=w < WIDTH, other=0.0).to(tl.float32)
    grad = tl.load(grad_scores + example * length + i, mask=inside, other=0.0)
    before_tanh = grad[:, None] * weight[None, :] * (1 - activity * activity)
    at = (example * length + i[:, None]) * WIDTH + w[None, :]
    tl.store(inner + at, before_tanh, mask=there)
    place = (example * chunks + chunk) * PADDED
    tl.store(grad_v + place + w, tl.sum(grad[:, None] * activity, 0))
    before = tl.cumsum(counts, 0) - counts
    tl.store(starts + place + w, tl.sum(tl.exp2(before * log2_decay)[:, None] * before_tanh, 0))


@triton.jit(do_not_specialize=["length", "chunks"])
def _outer_gradient_kernel(
    kept,
    totals,
    inner,
    starts,
    grad_parts,
    length,
    chunks,
    log2_decay,
    gain,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ALL: tl.constexpr,
):
    """The gradient of both parts: all later tokens contribute to the gradient of a token's summary part."""
    chunk, example, i, w, inside, there, counts = _tokens(kept, length, WIDTH, PADDED, CHUNK, ALL)
    # Gradients from all later chunks, starting with the last one.
    asked = tl.zeros([PADDED], dtype=tl.float32)
    for back in range(1, chunks - chunk):
        place = example * chunks + chunks - back
        asked = tl.exp2(tl.load(totals + place) * log2_decay) * asked + tl.load(starts + place * PADDED + w)
    before_tanh = tl.load(inner + (example * length + i[:, None]) * WIDTH + w[None, :], mask=there, other=0.0)
    grad = tl.dot(tl.trans(_decayed(counts, log2_decay, CHUNK)), before_tanh, input_precision="ieee")
    left = tl.exp2((tl.sum(counts, 0) - tl.cumsum(counts, 0)) * log2_decay)
    grad = gain * counts[:, None] * (grad + left[:, None] * asked[None, :])
    at = grad_parts + (example * length + i[:, None]) * 2 * WIDTH + w[None, :]
    tl.store(at, before_tanh, mask=there)
    tl.store(at + WIDTH, grad, mask=there)


def scan(parts: Tensor, kept: Tensor | None, decay: float, v: Tensor, bias: Tensor) -> Tensor:
    """(B, T) float32: v' tanh(local + summary of global before t) + bias (Eq. 3).

    Args:
        parts: (B, T, 2 W), W h_t followed by U h_t, contiguous, any floating dtype.
        kept: (B, T) bool, the tokens that enter the summary; None means all.
        v: (W,), bias: (1,).
    """
    return _Scan.apply(parts, kept, decay, v, bias)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, kept, decay, v, bias):
        batch, length, twice = parts.shape
        width = twice // 2
        chunks, padded = triton.cdiv(length, _CHUNK), max(16, triton.next_power_of_2(width))
        scores = torch.empty(batch, length, device=parts.device, dtype=torch.float32)
        ends = scores.new_empty(batch * chunks * (padded + 1))  # the same buffer also stores the token counts
        ctx.numbers = (length, chunks, math.log2(decay) if decay > 0 else _NEVER, 1 - decay)
        ctx.sizes = {"WIDTH": width, "PADDED": padded, "CHUNK": _CHUNK, "ALL": kept is None}
        kept = scores if kept is None else kept.contiguous().view(torch.uint8)
        totals = ends[batch * chunks * padded :]
        with torch.cuda.device_of(parts):
            if chunks > 1:
                _ends_kernel[(chunks, batch)](parts, kept, ends, totals, *ctx.numbers, **ctx.sizes)
            _scores_kernel[(chunks, batch)](
                parts, kept, ends, totals, v, bias, scores, *ctx.numbers, AT_ONCE=_CHUNKS_AT_ONCE, **ctx.sizes
            )
        # Without a mask, `kept` is the scores themselves, which must not be saved for the backward pass.
        ctx.save_for_backward(parts, None if ctx.sizes["ALL"] else kept, ends, v, bias)
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_scores):
        parts, kept, ends, v, bias = ctx.saved_tensors
        (length, chunks, *_), (batch, _, twice) = ctx.numbers, parts.shape
        padded = ctx.sizes["PADDED"]
        grad_scores = grad_scores.contiguous().float()
        kept = grad_scores if kept is None else kept
        inner = grad_scores.new_empty(batch, length, twice // 2)
        starts, grad_v = grad_scores.new_empty(2, batch * chunks, padded)
        grad_parts, totals = torch.empty_like(parts), ends[batch * chunks * padded :]
        grid = (chunks, batch)
        with torch.cuda.device_of(parts):
            _inner_gradient_kernel[grid](
                parts, kept, ends, totals, v, grad_scores, inner, starts, grad_v,
                *ctx.numbers, AT_ONCE=_CHUNKS_AT_ONCE, **ctx.sizes,
            )  # fmt: skip
            _outer_gradient_kernel[grid](kept, totals, inner, starts, grad_parts, *ctx.numbers, **ctx.sizes)
        grad_v = grad_v.sum(0)[: v.numel()].to(v.dtype)
        return grad_parts, None, None, grad_v, grad_scores.sum().view(1).to(bias.dtype)
