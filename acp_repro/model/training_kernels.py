"""The large elementwise operations of a training step (Triton).

The operations are SwiGLU's backward pass, and the softmax over the vocabulary in both passes. Each reads its
inputs once. The compiler of PyTorch 2.11 needed twice that time on an H200. It computes both halves of
SwiGLU's gradient at every place of either, and reads the logits once for the maximum and once for the sum.
Matrix products stay PyTorch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from acp_repro.attention.triton.tiles import LOG2E, enter_device

_ROWS, _COLUMNS = 8, 256  # the tile of the SwiGLU kernel
_WORDS = 8192  # the logits of a row that one step loads


@triton.jit
def _swiglu_backward_kernel(
    gate_up, grad, grad_gate_up, product, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    wide, narrow = row * (2 * width) + column, row * width + column
    gate = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + wide + width, mask=inside, other=0.0).to(tl.float32)
    arriving = tl.load(grad + narrow, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    slope = share * (1.0 + gate * (1.0 - share))
    element = product.dtype.element_ty
    tl.store(grad_gate_up + wide, (arriving * up * slope).to(element), mask=inside)
    tl.store(grad_gate_up + wide + width, (arriving * silu).to(element), mask=inside)
    tl.store(product + narrow, (silu * up).to(element), mask=inside)


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of silu(gate) * up with respect to ``gate_up`` (..., 2 W), and the product (..., W) again."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    grad_gate_up, product = torch.empty_like(gate_up), torch.empty_like(grad)
    width = grad.shape[-1]
    rows = grad.numel() // width
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))
    with enter_device(grad):
        _swiglu_backward_kernel[grid](
            gate_up, grad, grad_gate_up, product, rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
        )
    return grad_gate_up, product


@triton.jit
def _cross_entropy_kernel(logits, labels, loss, lse, stride, words, columns, ignored, WORDS: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    at = tl.arange(0, WORDS)
    largest = tl.full([], float("-inf"), tl.float32)
    # One sum per lane, reduced at the end; in the loop, only the maximum is reduced across lanes.
    sums = tl.zeros([WORDS], tl.float32)
    for first in range(0, words, WORDS):
        # Whole memory lines are loaded, also past the last logit, because a mask that ends inside a line
        # would split the load.
        x = tl.load(logits + first + at, mask=first + at < columns, other=float("-inf")).to(tl.float32)
        x = tl.where(first + at < words, x * LOG2E, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        # If all logits so far are -inf, any finite level works; -inf - -inf would be NaN.
        level = tl.where(largest == float("-inf"), 0.0, largest)
        sums = sums * tl.exp2(before - level) + tl.exp2(x - level)
    level = tl.where(largest == float("-inf"), 0.0, largest)
    total = (level + tl.log2(tl.sum(sums, 0))) / LOG2E
    label = tl.load(labels + row)
    counts = label != ignored
    # A label outside the vocabulary makes the loss NaN, and training stops at NaN.
    right = tl.load(logits + label, mask=(label >= 0) & (label < words), other=float("nan")).to(tl.float32)
    tl.store(loss + row, tl.where(counts, total - right, 0.0))
    tl.store(lse + row, total)


@triton.jit
def _logits_grad_kernel(
    logits, labels, lse, grad_loss, grad, stride, words, columns, ignored, WORDS: tl.constexpr
):
    row = tl.program_id(0)
    start = row.to(tl.int64) * stride
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    label = tl.load(labels + row)
    arriving = tl.where(label != ignored, tl.load(grad_loss + row), 0.0)
    level = tl.load(lse + row) * LOG2E
    x = tl.load(logits + start + at, mask=at < columns, other=0.0).to(tl.float32)
    p = tl.exp2(x * LOG2E - level) - tl.where(at == label.to(tl.int32), 1.0, 0.0)
    value = tl.where(at < words, p * arriving, 0.0)
    tl.store(grad + start + at, value.to(grad.dtype.element_ty), mask=at < columns)


def cross_entropy(logits: Tensor, labels: Tensor, words: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Loss in nats and log of the softmax's denominator (N,) of ``logits`` (N, V), of ``words`` columns."""
    loss, lse = torch.empty((2, len(labels)), dtype=torch.float32, device=logits.device)
    with enter_device(logits):
        _cross_entropy_kernel[(len(labels),)](
            logits,
            labels,
            loss,
            lse,
            logits.stride(0),
            words,
            logits.shape[1],
            ignored,
            WORDS=_WORDS,
            num_warps=8,
        )
    return loss, lse


def logits_grad(
    logits: Tensor, labels: Tensor, lse: Tensor, grad_loss: Tensor, words: int, ignored: int
) -> Tensor:
    """The gradient (N, V) of the logits of :func:`cross_entropy`; 0 past ``words``."""
    grad = torch.empty_like(logits)
    grad_loss = grad_loss.contiguous()  # the gradient of a mean is expanded
    rows, columns = logits.shape
    with enter_device(logits):
        _logits_grad_kernel[(rows, triton.cdiv(columns, _WORDS))](
            logits,
            labels,
            lse,
            grad_loss,
            grad,
            logits.stride(0),
            words,
            columns,
            ignored,
            WORDS=_WORDS,
            num_warps=8,
        )
    return grad
