"""How many tokens are kept, and which: the budget M of Eq. 2 and the top-M rule of Eq. 7."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .settings import RetentionConfig

_SLACK = 1e-6  # 0.29 * 100 is 28.999... in floating point, and means 29


def floor_share(lengths: Tensor, share: float) -> Tensor:
    """floor(share * length), at least 1 where there is a token; (B,) integer."""
    kept = torch.floor(lengths.double() * share + _SLACK).long()
    return torch.maximum(kept, lengths.clamp(max=1))


def token_budgets(config: RetentionConfig, lengths: Tensor, gates: int) -> list[Tensor]:
    """M of each gate, for each example: (B,) integer each, never rising from gate to gate.

    Args:
        lengths: (B,) the examples' own tokens, without padding.
        gates: how many gates there are.
    """
    if config.schedule == "profile":
        return [floor_share(lengths, share) for share in config.shares_of_profile]
    budgets = [floor_share(lengths, config.budget)]
    for _ in range(gates - 1):
        last = budgets[-1]
        budgets.append(floor_share(last, config.budget) if config.schedule == "geometric" else last)
    return budgets


def active_gates(config: RetentionConfig, places: Sequence[int]) -> tuple[int, ...]:
    """The places at which a gate can drop something: with a constant budget only the first."""
    if not places:
        return ()
    if config.schedule == "constant":
        return tuple(places[:1])
    if config.schedule == "geometric":
        return tuple(places)
    shares = config.shares_of_profile
    return tuple(p for i, p in enumerate(places) if shares[i] < (shares[i - 1] if i else 1.0))


def keep_top(scores: Tensor, candidates: Tensor, protected: Tensor, budget: Tensor) -> Tensor:
    """The top-M rule of Eq. 7: (B, T) bool, at most ``budget`` of each example's candidates.

    Protected candidates come first, then the largest scores; of equal scores the earlier position.

    Args:
        scores: (B, T) float; log-odds rather than probabilities, which saturate and tie.
        candidates: (B, T) bool: neither padding nor dropped before.
        protected: (B, T) bool.
        budget: (B,) integer.
    """
    limit = torch.finfo(torch.float32).max
    key = scores.detach().float().clamp(-limit, limit)
    key = key.masked_fill(protected, torch.inf).masked_fill(~candidates, -torch.inf)
    order = key.sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return (rank < budget[:, None]) & candidates


def check_protected(protected: Tensor, budget: Tensor, over_budget: str) -> Tensor:
    """The budget, raised to the protected tokens where ``over_budget`` is ``keep``.

    Raises:
        ValueError: the protected tokens of an example are more than its budget. Reads the numbers, so the
            host waits for a GPU.
    """
    needed = protected.sum(1)
    if over_budget == "keep":
        return torch.maximum(budget, needed)
    over = needed > budget
    if bool(over.any()):
        row = int(over.nonzero()[0, 0])
        raise ValueError(
            f"example {row}: {int(needed[row])} protected tokens are more than its budget of "
            f"{int(budget[row])}; raise budget, protect fewer, or set over_budget='keep'"
        )
    return budget


def compact(mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Indices that bring the true entries of ``mask`` to the front, in order.

    Args:
        mask: (B, T) bool.
        width: the most true entries of a row.

    Returns:
        (B, width) integer indices, and (B, width) bool: which of them are true entries and no filling.
    """
    order = (~mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :width]
    return order, torch.arange(width, device=mask.device) < mask.sum(1, keepdim=True)


def take(x: Tensor, indices: Tensor) -> Tensor:
    """``x`` (B, T, ...) at ``indices`` (B, M) of its second dimension."""
    rest = x.shape[2:]
    return x.gather(1, indices.reshape(*indices.shape, *[1] * len(rest)).expand(*indices.shape, *rest))
