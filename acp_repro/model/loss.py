"""Cross-entropy of a linear head, without float32 logits of the whole vocabulary.

With 32k tokens and 50k words, float32 logits and their softmax and gradient are 6.6 GB each. Here the
logits are held once, in the dtype of the product; everything float32 exists for one chunk of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED_LABEL = -100

# Float32 numbers alive at a time. On a GPU 2^27 (0.5 GiB): 2,670 tokens of GPT-2's vocabulary, enough
# for matrix products at full speed. A CPU is faster with chunks that stay in its cache.
_CHUNK_NUMBERS_GPU = 2**27
_CHUNK_NUMBERS_CPU = 2**20
# Each chunk adds to the whole gradient of the weight, so it must not be too short either.
_FEWEST_TOKENS = 256


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    """-log softmax(hidden weight^T)[labels], for every token.

    Under autocast the products are computed in its dtype and the softmax in float32; the weight's
    gradient is summed over chunks in float32.

    Args:
        hidden: (B, T, hidden).
        weight: (vocab, hidden).
        labels: (B, T) integer; -100 gives loss 0 and no gradient.
        chunk_tokens: tokens in a chunk; None bounds the chunk's memory.

    Returns:
        (B, T) float32.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    if chunk_tokens is None:
        numbers = _CHUNK_NUMBERS_CPU if device == "cpu" else _CHUNK_NUMBERS_GPU
        chunk_tokens = max(_FEWEST_TOKENS, numbers // weight.shape[0])
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        loss = _LinearCrossEntropy.apply(
            hidden.flatten(0, 1), weight, labels.flatten().long(), chunk_tokens, dtype, keep
        )
    return loss.view(labels.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk_tokens, dtype, keep):
        tokens = hidden.shape[0]
        weight_t = weight.to(dtype).T
        loss = hidden.new_empty(tokens, dtype=torch.float32)
        kept = []
        for start in range(0, tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = hidden[rows].to(dtype) @ weight_t
            log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            ignored, right = _labels(labels[rows])
            loss[rows] = -log_p.gather(-1, right).masked_fill_(ignored, 0.0).squeeze(-1)
            if keep:
                kept.append(logits)
        ctx.chunk_tokens, ctx.dtype = chunk_tokens, dtype
        ctx.save_for_backward(hidden, weight, labels, *kept)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        hidden, weight, labels, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        cast_weight = weight.to(ctx.dtype)
        for index, logits in enumerate(kept):
            start = index * ctx.chunk_tokens
            rows = slice(start, start + ctx.chunk_tokens)
            # d loss / d logits = (softmax - one at the label), times what arrives for the token.
            grad = torch.softmax(logits, dim=-1, dtype=torch.float32)
            ignored, right = _labels(labels[rows])
            # scatter_ of one value a row: scatter_add_ would not be deterministic on a GPU.
            grad.scatter_(-1, right, grad.gather(-1, right) - 1.0)
            grad = grad.mul_(grad_loss[rows, None].masked_fill(ignored, 0.0)).to(ctx.dtype)
            if needs_hidden:
                grad_hidden[rows] = grad @ cast_weight
            if needs_weight:
                grad_weight += grad.T @ hidden[rows].to(ctx.dtype)
        if needs_weight:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) -> which are ignored (N, 1) bool, and indices that gather accepts (N, 1)."""
    ignored = (labels == IGNORED_LABEL).unsqueeze(-1)
    return ignored, labels.unsqueeze(-1).masked_fill(ignored, 0)
