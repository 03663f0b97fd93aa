"""Attention with a bias on its keys, forward and backward in Triton, without storing any (T, T) tensor.

One program computes the whole backward pass for some keys of a head. It accumulates the gradient of the
queries in float32, tile by tile in a fixed order, so results are bitwise reproducible. If heads and examples
are too few to fill a GPU, the keys are split and the partial results summed. Dropout hashes the position of a
weight, so that both passes drop the same weights.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = math.log2(math.e)
_FULL = 264  # programs that fill a GPU twice
_MOST_SPLITS = 4
_LONGEST = 2048  # for longer texts cuDNN's attention with wider heads is faster but uses more memory
_FORWARD = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
_BACKWARD = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`attend` supports the tensors (B, H, T, D) and was measured to be no slower than others.

    The kernel supports half precision, head dimensions 16, 32 and 64, texts of limited length, and GPUs from
    Ampere on.
    """
    length, width = query.shape[-2:]
    fits = width in (16, 32, 64) and query.shape == key.shape == value.shape and 0 < length <= _LONGEST
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return fits and query.dtype in (torch.bfloat16, torch.float16) and len(query) > 0


@triton.jit
def _mixed(x):
    """A 32-bit integer hash. Each bit of the result depends on all of ``x``, most strongly the high bits."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x


@triton.jit
def _stays(row, column, threshold):
    """Whether a weight survives dropout; ``row`` and ``column`` are hashes that broadcast to its tile."""
    return _mixed(row ^ column) >= threshold


@triton.jit
def _row_hash(seed, head, i):
    return _mixed(_mixed(seed + head.to(tl.uint32)) + i.to(tl.uint32))


@triton.jit
def _column_hash(j):
    return j.to(tl.uint32) * 0x9E3779B1


@triton.jit
def _head_and_queries(length, BLOCK_M: tl.constexpr):
    """A program's head and queries. Blocks of a head are adjacent; all heads would exceed the grid's y."""
    blocks = tl.cdiv(length, BLOCK_M)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _tile(at, i, d, stride, length):
    # int64, because in a tokens-first layout the stride between tokens of one text spans the batch.
    return tl.load(at + i.to(tl.int64)[:, None] * stride + d[None, :], mask=(i < length)[:, None], other=0.0)


@triton.jit(do_not_specialize=["length", "seed", "threshold"])
def _forward_kernel(
    q, k, v, bias, out, lse,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    heads, length, scale, gain, seed, threshold,
    WIDTH: tl.constexpr, DROPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, i = _head_and_queries(length, BLOCK_M)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    d = tl.arange(0, WIDTH)
    queries = _tile(q + b * qb + h * qh, i, d, qt, length)
    k += b * kb + h * kh
    v += b * vb + h * vh
    row = _row_hash(seed, head, i)
    high = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
    for first in range(0, length, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        added = tl.load(bias + b * length + j, mask=j < length, other=float("-inf")) * 1.4426950408889634
        scores = tl.dot(queries, tl.trans(_tile(k, j, d, kt, length))) * scale + added[None, :]
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        if DROPS:
            weights = tl.where(_stays(row[:, None], _column_hash(j)[None, :], threshold), weights, 0.0)
        acc = tl.dot(weights.to(v.dtype.element_ty), _tile(v, j, d, vt, length), acc * shrink[:, None])
        high = higher
    inside = i < length
    at = out + b * ob + h * oh + i[:, None] * ot + d[None, :]
    tl.store(at, (acc * (gain / total)[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + head.to(tl.int64) * length + i, high + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _delta_kernel(
    out, grad, delta, ob, oh, ot, gb, gh, gt, heads, length, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The sum of the output times its gradient, for each query."""
    head, i = _head_and_queries(length, BLOCK_M)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    d = tl.arange(0, WIDTH)
    product = _tile(out + b * ob + h * oh, i, d, ot, length).to(tl.float32)
    product *= _tile(grad + b * gb + h * gh, i, d, gt, length).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * length + i, tl.sum(product, 1), mask=i < length)


@triton.jit(do_not_specialize=["length", "seed", "threshold", "part"])
def _backward_kernel(
    q, k, v, bias, grad, lse, delta, partial, grad_q, grad_k, grad_v, grad_bias,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot,
    heads, length, part, scale, plain_scale, gain, seed, threshold,
    WIDTH: tl.constexpr, DROPS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The backward pass of ``part`` keys, from ``part`` times the program id on, against all queries.

    ``partial`` (SPLITS, B, H, T, D) float32 accumulates the gradient of the queries. Without splits the step
    of the last keys writes the result; otherwise the host sums the splits. Strides o belong to the three
    gradients.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    b, h, wide_head = (head // heads).to(tl.int64), (head % heads).to(tl.int64), head.to(tl.int64)
    d = tl.arange(0, WIDTH)
    q += b * qb + h * qh
    k += b * kb + h * kh
    v += b * vb + h * vh
    grad += b * gb + h * gh
    grad_q += b * ob + h * oh
    lse += wide_head * length
    delta += wide_head * length
    partial += (split.to(tl.int64) * tl.num_programs(0) + wide_head) * length * WIDTH
    begin = split * part
    end = tl.minimum(begin + part, length)
    for first in range(begin, end, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        keys, values = _tile(k, j, d, kt, length), _tile(v, j, d, vt, length)
        added = tl.load(bias + b * length + j, mask=j < length, other=float("-inf")) * 1.4426950408889634
        column = _column_hash(j)
        sum_k = tl.zeros([BLOCK_N, WIDTH], dtype=tl.float32)
        sum_v = tl.zeros([BLOCK_N, WIDTH], dtype=tl.float32)
        sum_bias = tl.zeros([BLOCK_N], dtype=tl.float32)
        for start in range(0, length, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            inside = i < length
            queries, asked = _tile(q, i, d, qt, length), _tile(grad, i, d, gt, length)
            normal = tl.load(lse + i, mask=inside, other=float("inf"))
            mean = tl.load(delta + i, mask=inside, other=0.0)
            # Both are transposed, (BLOCK_N, BLOCK_M), the layout that the two sums over queries need.
            scores = tl.dot(keys, tl.trans(queries)) * scale + added[:, None]
            weights = tl.exp2(scores - normal[None, :])
            of_weights = tl.dot(values, tl.trans(asked)) * gain
            used = weights * gain
            if DROPS:
                stays = _stays(_row_hash(seed, head, i)[None, :], column[:, None], threshold)
                of_weights = tl.where(stays, of_weights, 0.0)
                used = tl.where(stays, used, 0.0)
            sum_v = tl.dot(used.to(asked.dtype), asked, sum_v)
            of_scores = weights * (of_weights - mean[None, :])
            sum_bias += tl.sum(of_scores, 1)
            of_scores = of_scores.to(queries.dtype)
            sum_k = tl.dot(of_scores, queries, sum_k)
            sum_q = tl.dot(tl.trans(of_scores), keys)
            # The tile's offset is separate from the entry's, because one sum of both spills registers.
            at = partial + tl.cast(start, tl.int64) * WIDTH
            at += tl.arange(0, BLOCK_M)[:, None] * WIDTH + d[None, :]
            if first > begin:
                sum_q += tl.load(at, mask=inside[:, None], other=0.0)
            if SPLITS == 1 and first + BLOCK_N >= end:
                written = (sum_q * plain_scale).to(grad_q.dtype.element_ty)
                tl.store(grad_q + i[:, None] * ot + d[None, :], written, mask=inside[:, None])
            else:
                tl.store(at, sum_q, mask=inside[:, None])
        there = (j < length)[:, None]
        at = b * ob + h * oh + j[:, None] * ot + d[None, :]
        tl.store(grad_k + at, (sum_k * plain_scale).to(grad_k.dtype.element_ty), mask=there)
        tl.store(grad_v + at, sum_v.to(grad_v.dtype.element_ty), mask=there)
        tl.store(grad_bias + wide_head * length + j, sum_bias, mask=j < length)
        tl.debug_barrier()  # other threads read ``partial`` next than wrote it


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, scale: float) -> Tensor:
    """softmax(q k' scale + bias) v with dropout on the weights, differentiable in all four tensors.

    Args:
        query, key, value: (B, H, T, D), a dtype and D that :func:`takes` accepts, contiguous in D.
        bias: (B, T) float32, finite.
        dropout: dropped share of the weights, below 1. PyTorch's CPU generator seeds the choice.

    Returns:
        (B, T, H, D), contiguous, in the dtype of ``query``.
    """
    return _Attend.apply(query, key, value, bias, dropout, scale)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias, dropout, scale):
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        bias = bias.contiguous()
        batch, heads, length, width = query.shape
        out = query.new_empty(batch, length, heads, width)
        turned = out.transpose(1, 2)
        lse = bias.new_empty(batch, heads, length)
        seed = int(torch.randint(2**31, (), device="cpu")) if dropout else 0
        ctx.numbers = (scale * _LOG2E, 1 / (1 - dropout), seed, round(dropout * 2**32))
        ctx.scale, ctx.sizes = scale, {"WIDTH": width, "DROPS": dropout > 0}
        grid = (triton.cdiv(length, _FORWARD["BLOCK_M"]) * batch * heads,)
        with torch.cuda.device_of(query):
            _forward_kernel[grid](
                query, key, value, bias, out, lse,
                *_strides(query, key, value, turned), heads, length, *ctx.numbers, **ctx.sizes, **_FORWARD,
            )  # fmt: skip
        ctx.save_for_backward(query, key, value, bias, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        query, key, value, bias, out, lse = ctx.saved_tensors
        batch, heads, length, width = query.shape
        grad = (grad if grad.stride(-1) == 1 else grad.contiguous()).transpose(1, 2)
        turned = out.transpose(1, 2)
        delta, of_bias = torch.empty_like(lse), torch.empty_like(lse)
        gradients = [out.new_empty(out.shape).transpose(1, 2) for _ in range(3)]
        blocks = triton.cdiv(length, _BACKWARD["BLOCK_N"])
        splits = max(1, min(_MOST_SPLITS, blocks, _FULL // (batch * heads)))
        part = triton.cdiv(blocks, splits) * _BACKWARD["BLOCK_N"]
        splits = triton.cdiv(length, part)
        partial = lse.new_empty(splits, batch, heads, length, width)
        scale, gain, seed, threshold = ctx.numbers
        with torch.cuda.device_of(query):
            _delta_kernel[(triton.cdiv(length, 64) * batch * heads,)](
                out, grad, delta, *_strides(turned, grad), heads, length, width, BLOCK_M=64
            )
            _backward_kernel[(batch * heads, splits)](
                query, key, value, bias, grad, lse, delta, partial, *gradients, of_bias,
                *_strides(query, key, value, grad, gradients[0]), heads, length, part,
                scale, ctx.scale, gain, seed, threshold, SPLITS=splits, **ctx.sizes, **_BACKWARD,
            )  # fmt: skip
        if splits > 1:
            gradients[0] = (partial.sum(0) * ctx.scale).to(query.dtype)
        return *gradients, of_bias.sum(1), None, None
