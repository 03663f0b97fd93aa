"""Gates, their masks, and the compression loss of the article, as functions of tensors.

A token's gate is read from element 0 of its vector. The log gate is added to the attention scores in the
token's row and column, except on the diagonal. Log gates accumulate over the gated blocks.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import LOG_REMOVED, PruningConfig

STRETCHED = (-0.1, 1.1)  # range of hard concrete gates, as in Louizos et al.
SMALLEST = 1e-6  # smallest nonzero gate


def log_gates(signal: Tensor, config: PruningConfig, noise: Tensor | None = None) -> Tensor:
    """The logarithm of the gates, at most 0 ("Learnable Token Selection").

    Args:
        signal: (...), element 0 of the vectors, any floating dtype.
        noise: (...) float32, sampled by :func:`draw_noise`; None at evaluation.

    Returns:
        (...) float32; -inf where a hard concrete gate is 0. With a finite number instead, a model learns to
        attend through the mask, because T5's unscaled scores grow beyond this number
        (docs/lab-notebook/learnable-attention-pruning.md).
    """
    signal = signal.float()
    if config.training_mask == "hard_concrete":
        signal = _limited(signal, config) + config.beta
        gate = torch.sigmoid(signal if noise is None else (signal + noise) / config.tau)
        low, high = STRETCHED
        gate = (gate * (high - low) + low).clamp(0.0, 1.0)
        return torch.where(gate > 0, gate.clamp_min(SMALLEST).log(), -math.inf)
    if config.gate == "article":
        return F.logsigmoid(signal / config.tau + config.beta)
    return F.logsigmoid((signal + config.beta + (0.0 if noise is None else noise)) / config.tau)


def open_probability(signal: Tensor, config: PruningConfig) -> Tensor:
    """The probability that a hard concrete gate is not 0 in training: (...) float32 in 0 to 1."""
    low, high = STRETCHED
    return torch.sigmoid(_limited(signal.float(), config) + config.beta - config.tau * math.log(-low / high))


def _limited(signal: Tensor, config: PruningConfig) -> Tensor:
    return signal if config.signal_limit is None else signal / (1 + signal.abs() / config.signal_limit)


def draw_noise(
    shape: Sequence[int], config: PruningConfig, generator: torch.Generator | None = None
) -> Tensor | None:
    """The noise of one training batch on the CPU, float32 of ``shape``; None if ``noise`` is ``none``."""
    if config.noise == "none":
        return None
    uniform = torch.rand(tuple(shape), generator=generator).clamp(1e-6, 1 - 1e-6)
    if config.noise == "gumbel":
        return -torch.log(-torch.log(uniform))
    return torch.logit(uniform)


class _StraightThrough(torch.autograd.Function):
    """Forward: 0 for kept tokens and LOG_REMOVED for others. Backward: the gradient of the mask log(alpha).

    Attention weights token k by alpha_k e^{s_k}. The derivative with respect to alpha_k is therefore the
    derivative with respect to the mask, divided by alpha_k. This class divides by the weight of the forward
    pass instead: 1 or e^-60.
    """

    @staticmethod
    def forward(ctx, log_gate: Tensor, kept: Tensor, limit: Tensor) -> Tensor:
        ctx.save_for_backward(log_gate, kept, limit)
        return torch.where(kept, 0.0, LOG_REMOVED)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        log_gate, kept, limit = ctx.saved_tensors
        credit = torch.where(kept, gradient, gradient * math.exp(-LOG_REMOVED))
        # At alpha = 0 the slope does not saturate and can far exceed the token's true effect.
        return credit.clamp(-limit, limit) * log_gate.exp(), None, None


def straight_through(log_gate: Tensor, kept: Tensor, limit: Tensor) -> Tensor:
    """A mask that removes tokens and has the gradient of the soft mask.

    Args:
        log_gate: (B, T) float32.
        kept: (B, T) bool.
        limit: a scalar, the bound on the derivative of the loss with respect to a gate.

    Returns:
        (B, T), 0 or :data:`LOG_REMOVED`.
    """
    return _StraightThrough.apply(log_gate, kept, limit)


def pair_mask(mask: Tensor) -> Tensor:
    """The mask of self-attention: (B, T) -> (B, 1, T, T), same dtype. Entry (j, k) is m_j + m_k, the diagonal
    is 0.

    The article sets g where j = i xor k = i; summed over i, both masks are equal.
    """
    pairs = mask[:, None, :, None] + mask[:, None, None, :]
    diagonal = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return pairs.masked_fill(diagonal, 0.0)


def soft_lengths(log_gate: Tensor, real: Tensor, d_kv: int, kept: Tensor | None = None) -> Tensor:
    """L(s) of the article: the soft number of tokens after each gate.

    Args:
        log_gate: (S, B, T) float32, 0 for tokens that are never dropped.
        real: (B, T) bool, False for padding.
        d_kv: dimensions of a head's key, the d of P = exp(G / sqrt(d)).
        kept: (S, B, T) bool, for a straight-through mask: these tokens are counted, with the gradient of the
            sum of exp(G). The article divides by sqrt(d) because a masked token may still be read. A removed
            token cannot be read, so its cost and its value fall equally as its gate closes.

    Returns:
        (S + 1, B) float32; the first row is the length without padding.
    """
    summed = log_gate.cumsum(0)
    if kept is None:
        probability = (summed / math.sqrt(d_kv)).exp()
    else:
        probability = summed.exp()
        probability = kept.float() + probability - probability.detach()
    lengths = (probability * real).sum(-1)
    return torch.cat([real.sum(-1, dtype=lengths.dtype)[None], lengths])


def expected_lengths(probability: Tensor, real: Tensor) -> Tensor:
    """L(s) of hard concrete gates: the expected number of tokens after each gate.

    Args:
        probability: (S, B, T) float32, that each gate is open; 1 for tokens that are never dropped.
        real: (B, T) bool, False for padding.

    Returns:
        (S + 1, B) float32; the first row is the length without padding.
    """
    # Avoids cumprod, whose backward pass synchronises the host.
    inside = torch.stack(list(itertools.accumulate(probability.unbind(0), torch.mul)))
    lengths = (inside * real).sum(-1)
    return torch.cat([real.sum(-1, dtype=lengths.dtype)[None], lengths])


def compression_loss(lengths: Tensor) -> Tensor:
    """The mean over gates of R(s)^2, R(s) = L(s) / L(s - 1), averaged over texts.

    Args:
        lengths: (S + 1, B) float32; see :func:`soft_lengths`.

    Returns:
        A scalar; 1 if nothing is dropped.
    """
    return (lengths[1:] / lengths[:-1]).square().mean()
