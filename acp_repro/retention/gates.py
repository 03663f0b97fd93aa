"""Hard-Concrete (Eq. 6, Louizos et al. 2018), and the gates of each method: scores and training.

``adaptive`` is the paper's method; the others are its baselines on the same encoder.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import RetentionConfig
from .scorer import RetentionScorer, wide

_EDGE = 1e-6  # margin of u from 0 and 1, where its log-odds are infinite


def hard_concrete(logits: Tensor, u: Tensor, temperature: float, stretch: tuple[float, float]) -> Tensor:
    """z of Eq. 6 in [0, 1]: clamp(sigmoid((s + log u - log(1 - u)) / beta) (zeta - gamma) + gamma).

    Args:
        logits: s = log alpha, any shape, float.
        u: uniform noise in (0, 1), of the same shape.
        temperature: beta.
        stretch: (gamma, zeta).

    Returns:
        z in the shape and dtype of ``logits``.
    """
    low, high = stretch
    u = u.clamp(_EDGE, 1 - _EDGE)
    noise = torch.log(u) - torch.log1p(-u)
    return (torch.sigmoid((logits + noise) / temperature) * (high - low) + low).clamp(0, 1)


def open_logits(logits: Tensor, temperature: float, stretch: tuple[float, float]) -> Tensor:
    """Log-odds of z > 0: s - beta log(-gamma / zeta), in the shape and dtype of ``logits``."""
    low, high = stretch
    return logits - temperature * math.log(-low / high)


def counted_share(config: RetentionConfig, logits: Tensor) -> Tensor:
    """Each token's contribution to the budget: p = sigmoid(s) of Eq. 5, or P(z > 0); same shape and dtype."""
    if config.penalty == "expected_l0" and config.relaxation == "hard_concrete":
        logits = open_logits(logits, config.temperature, config.stretch)
    return torch.sigmoid(logits)


@dataclass
class GateInputs:
    """A gate's inputs for the remaining tokens."""

    hidden: Tensor  # (B, T, D)
    valid: Tensor  # (B, T) bool: neither padding nor dropped
    received: Tensor | None  # (B, T) float, from the previous block, for methods that rank by it
    ids: Tensor | None  # (B, T) integer
    positions: Tensor  # (B, T) integer, in the original sequence
    is_full: bool = False  # whether all tokens are known to be valid


class Gate(nn.Module, ABC):
    """One gate: scores for every token, and soft z for learned gates."""

    needs_attention = False

    def __init__(self, config: RetentionConfig, hidden_size: int):
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(self, inputs: GateInputs) -> Tensor:
        """(B, T) float32 scores: larger scores are kept first. Log-odds of p for learned gates."""

    def sample(self, scores: Tensor) -> Tensor:
        """A soft z in [0, 1] for training, (B, T) float32, from scores (B, T)."""
        config = self.config
        if config.relaxation == "sigmoid":
            return torch.sigmoid(scores)
        return hard_concrete(scores, torch.rand_like(scores), config.temperature, config.stretch)

    def rank_values(self, scores: Tensor, inputs: GateInputs) -> Tensor:
        """(B, T) float32, the values that top-M ranks by at inference; by default the scores."""
        return scores

    def extra_loss(self, scores: Tensor, valid: Tensor) -> Tensor | None:
        """A method's additional training loss besides the budget's penalty, a float32 scalar, or None."""
        return None


class AdaptiveGate(Gate):
    """Section 3.2: the scoring network with its running summary."""

    def __init__(self, config: RetentionConfig, hidden_size: int):
        super().__init__(config, hidden_size)
        self.scorer = RetentionScorer(
            hidden_size, config.scorer_width, config.summary_decay, config.initial_logit
        )

    def forward(self, inputs: GateInputs) -> Tensor:
        """Scores (B, T) float32 of the scoring network: log-odds of p (Eq. 3)."""
        return self.scorer(inputs.hidden, None if inputs.is_full else inputs.valid)


class RandomGate(Gate):
    """Random selection: resampled at each training step; at inference a function of example and seed."""

    def forward(self, inputs: GateInputs) -> Tensor:
        """Random scores (B, T) float32."""
        if self.training:
            return torch.rand(inputs.valid.shape, device=inputs.valid.device)
        ids = torch.zeros_like(inputs.positions) if inputs.ids is None else inputs.ids
        # A hash of the example, so that the selection does not depend on the rest of the batch.
        words = (ids + 1) * inputs.valid
        fingerprint = (_mix(words * 0x9E3779B1 + inputs.positions) * inputs.valid).sum(1, keepdim=True)
        noise = _mix(_mix(fingerprint + self.config.seed * 0x85EBCA6B) + inputs.positions)
        return (noise & 0xFFFFFF).float() / 2**24


class H2OGate(Gate):
    """Heavy hitters: most received attention, summed over heads and queries (Zhang et al. 2023)."""

    needs_attention = True

    def forward(self, inputs: GateInputs) -> Tensor:
        """The attention received, (B, T) float32."""
        assert inputs.received is not None
        return inputs.received


class RankGate(Gate):
    """Constraint-aware pruning (Li et al. 2023, "ToP"): learned gates on ranks by received attention.

    Every bucket of relative rank has a Hard-Concrete gate. One more gate belongs to the whole place: while it
    is closed, no token is pruned at this place. At inference the M tokens with the best ranks are kept.
    """

    needs_attention = True

    def __init__(self, config: RetentionConfig, hidden_size: int):
        super().__init__(config, hidden_size)
        self.rank_logits = nn.Parameter(torch.full((config.ranks,), config.initial_logit))
        self.layer_logit = nn.Parameter(torch.full((), 2.0))

    def forward(self, inputs: GateInputs) -> Tensor:
        """Log-odds (B, T) float32 of the gate of each token's rank."""
        length = inputs.valid.sum(1, keepdim=True).clamp(min=1)
        assert inputs.received is not None
        rank = _ranks(inputs.received.masked_fill(~inputs.valid, -torch.inf))
        bucket = (
            (rank * self.config.ranks).div(length, rounding_mode="floor").clamp(max=self.config.ranks - 1)
        )
        p_rank = torch.sigmoid(wide(self.rank_logits))[bucket]
        # A token is kept if the place does not prune, or if the gate of its rank is open.
        p = 1 - torch.sigmoid(wide(self.layer_logit)) * (1 - p_rank)
        return torch.logit(p.clamp(1e-6, 1 - 1e-6))

    def rank_values(self, scores: Tensor, inputs: GateInputs) -> Tensor:
        """The attention received, (B, T) float32."""
        assert inputs.received is not None
        return inputs.received


class InformationGate(Gate):
    """Infor-Coef (Tan 2023): an MLP sampler, Gumbel-softmax, an information bottleneck."""

    def __init__(self, config: RetentionConfig, hidden_size: int):
        super().__init__(config, hidden_size)
        self.sampler = nn.Sequential(
            nn.LayerNorm(hidden_size),
            nn.Linear(hidden_size, config.scorer_width),
            nn.GELU(),
            nn.Linear(config.scorer_width, 2),
        )
        bias: Any = self.sampler[-1].bias
        nn.init.zeros_(bias)
        nn.init.constant_(bias[0], config.initial_logit)

    def forward(self, inputs: GateInputs) -> Tensor:
        """Log-odds (B, T) float32 of the sampler."""
        keep, drop = wide(self.sampler(inputs.hidden)).unbind(-1)
        return keep - drop

    def sample(self, scores: Tensor) -> Tensor:
        """z by Gumbel-softmax, (B, T) float32 in (0, 1)."""
        # Gumbel-softmax of two classes is a logistic relaxation without stretch.
        u = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
        return torch.sigmoid((scores + torch.log(u) - torch.log1p(-u)) / self.config.temperature)

    def extra_loss(self, scores: Tensor, valid: Tensor) -> Tensor:
        """KL(Bernoulli(p) || Bernoulli(rho)), averaged over tokens of ``scores`` (B, T): a float32 scalar."""
        rho = torch.full((), min(self.config.budget, 1 - 1e-6), dtype=scores.dtype, device=scores.device)
        log_p, log_not = nn.functional.logsigmoid(scores), nn.functional.logsigmoid(-scores)
        kl = log_p.exp() * (log_p - rho.log()) + log_not.exp() * (log_not - torch.log1p(-rho))
        return self.config.bottleneck_weight * (kl * valid).sum() / valid.sum().clamp(min=1)


GATES: dict[str, type[Gate]] = {
    "adaptive": AdaptiveGate,
    "random": RandomGate,
    "h2o": H2OGate,
    "top": RankGate,
    "infor_coef": InformationGate,
}


def _ranks(x: Tensor) -> Tensor:
    """The rank of each entry in its row, in descending order: (B, T) integer."""
    order = x.sort(dim=1, descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(x.shape[1], device=x.device).expand_as(order)
    )


def _mix(x: Tensor) -> Tensor:
    """A 32-bit hash of each integer (the finaliser of MurmurHash3)."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)
