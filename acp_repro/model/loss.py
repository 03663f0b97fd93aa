"""Cross-entropy of a linear head, without float32 logits of the whole vocabulary.

For 32k tokens and a vocabulary of 50k, float32 logits and their softmax and gradient are 6.6 GB each. Here
logits are computed for a chunk of tokens at a time, in the dtype of the product, and stored once. Beyond a
limit they are computed again in the backward pass. Float32 values stay in a kernel's registers on a GPU, and
in a small chunk on a CPU.

A GPU multiplies matrices fastest if rows are whole lines of memory. The size of the vocabulary affects the
speed: 50,277 tokens took four times as long as 50,304. Rows of zeros are therefore appended to the copy of
the weight that the products read. No other tensor is padded: not the weight, its gradient, or a logit that
counts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acp_repro.attention.backends import HAS_TRITON

from .modules import is_plain, kernels_of

IGNORED_LABEL = -100

# Logits in a chunk. On a GPU 2^29 (1 GiB of bfloat16), or 10,680 tokens with GPT-2's vocabulary: each chunk
# accumulates into the whole gradient of the weight, so few chunks are faster. On a CPU, chunks that fit into
# the cache are faster.
_CHUNK_NUMBERS_GPU = 2**29
_CHUNK_NUMBERS_CPU = 2**20
_FEWEST_TOKENS = 256
# The maximum number of logits saved for the backward pass (8 GiB of bfloat16); others are recomputed.
_KEPT_NUMBERS = 2**32
# bfloat16 numbers in a memory line of 128 bytes. Matrix products on a GPU are fast only with whole lines.
_LINE = {"cpu": 1}
_LINE_GPU = 64


def head_cross_entropy(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
    """:func:`linear_cross_entropy` of a plain linear ``head``, else of the logits that ``head`` returns."""
    if isinstance(head, nn.Linear) and is_plain(head) and head.bias is None:
        return linear_cross_entropy(hidden, head.weight, labels)
    logits = head(hidden).float().transpose(1, 2)
    return F.cross_entropy(logits, labels.long(), ignore_index=IGNORED_LABEL, reduction="none")


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    """-log softmax(hidden weight^T)[labels], for every token, in nats.

    Under autocast the products are computed in its dtype and the softmax in float32. The weight's gradient is
    summed over chunks in float32.

    Args:
        hidden: (B, T, hidden), any floating dtype.
        weight: (vocab, hidden).
        labels: (B, T) integer; -100 has loss 0 and no gradient.
        chunk_tokens: tokens in a chunk; None bounds the chunk's memory.

    Returns:
        (B, T) float32.
    """
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    if chunk_tokens is None:
        numbers = _CHUNK_NUMBERS_CPU if device == "cpu" else _CHUNK_NUMBERS_GPU
        most = max(_FEWEST_TOKENS, numbers // weight.shape[0])
        chunks = -(-labels.numel() // most)
        chunk_tokens = -(-labels.numel() // chunks)  # equal sizes
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    kept_chunks = _KEPT_NUMBERS // (chunk_tokens * weight.shape[0]) if keep else 0
    with torch.autocast(device, enabled=False):
        loss = _LinearCrossEntropy.apply(
            hidden.flatten(0, 1), weight, labels.flatten().long(), chunk_tokens, dtype, kept_chunks
        )
    return loss.view(labels.shape)


def _pad_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(vocab, hidden) in ``dtype``; on a GPU rows of zeros fill it up to a whole line of words."""
    missing = -weight.shape[0] % _LINE.get(weight.device.type, _LINE_GPU)
    if not missing:
        return weight.to(dtype)
    vocab, hidden = weight.shape
    filled = weight.new_empty((vocab + missing, hidden), dtype=dtype)
    filled[:vocab] = weight
    filled[vocab:] = 0
    return filled


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk_tokens, dtype, kept_chunks):
        tokens, vocab = hidden.shape[0], weight.shape[0]
        rows_of_words = _pad_rows(weight, dtype)
        loss, lse = hidden.new_empty((2, tokens), dtype=torch.float32)
        kept = []
        for start in range(0, tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = hidden[rows].to(dtype) @ rows_of_words.T
            loss[rows], lse[rows] = _loss_and_lse(logits, labels[rows], vocab)
            if len(kept) < kept_chunks:
                kept.append(logits)
        ctx.chunk_tokens, ctx.dtype = chunk_tokens, dtype
        ctx.save_for_backward(hidden, weight, labels, lse, *kept)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        hidden, weight, labels, lse, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        vocab = weight.shape[0]
        rows_of_words = _pad_rows(weight, ctx.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_rows = torch.zeros_like(rows_of_words, dtype=torch.float32) if needs_weight else None
        for index, start in enumerate(range(0, hidden.shape[0], ctx.chunk_tokens)):
            rows = slice(start, start + ctx.chunk_tokens)
            read = hidden[rows].to(ctx.dtype)
            logits = kept[index] if index < len(kept) else read @ rows_of_words.T
            grad = _grad_of_logits(logits, labels[rows], lse[rows], grad_loss[rows], vocab)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ rows_of_words
            if grad_rows is not None:
                grad_rows += grad.T @ read
        grad_weight = None if grad_rows is None else grad_rows[:vocab].to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _loss_and_lse(logits: Tensor, labels: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """(N, V), (N,) -> the loss of each token and the log of its softmax's denominator, float32."""
    # Columns from `vocab` on are padding.
    if _has_kernels(logits):
        return kernels_of("training").cross_entropy(logits, labels, vocab, IGNORED_LABEL)
    logits = logits[:, :vocab]
    lse = torch.logsumexp(logits.float(), -1)
    ignored = labels == IGNORED_LABEL
    right = logits.gather(-1, labels.masked_fill(ignored, 0)[:, None])[:, 0].float()
    return (lse - right).masked_fill(ignored, 0.0), lse


def _grad_of_logits(logits: Tensor, labels: Tensor, lse: Tensor, grad_loss: Tensor, vocab: int) -> Tensor:
    """(softmax - one at the label) times the token's gradient, like the logits; 0 from ``vocab`` on."""
    if _has_kernels(logits):
        return kernels_of("training").logits_grad(logits, labels, lse, grad_loss, vocab, IGNORED_LABEL)
    grad = torch.exp(logits.float() - lse[:, None])
    word = torch.arange(logits.shape[-1], device=logits.device)
    if torch.compiler.is_compiling():  # a scatter would break the fusion and add a copy
        grad = grad - (word == labels[:, None]).float()
    else:
        grad[torch.arange(len(grad), device=grad.device), labels.clamp(min=0)] -= 1.0
    grad = grad.mul_(grad_loss.masked_fill(labels == IGNORED_LABEL, 0.0)[:, None])
    if vocab < logits.shape[-1]:
        grad = grad.masked_fill(word >= vocab, 0.0)
    return grad.to(logits.dtype)


def _has_kernels(logits: Tensor) -> bool:
    if not logits.is_cuda or logits.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return HAS_TRITON
