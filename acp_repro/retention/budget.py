"""Token budgets and selection: the budget M of Eq. 2 and the top-M rule of Eq. 7."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .config import RetentionConfig

Length = TypeVar("Length", int, Tensor)
_SLACK = 1e-6  # 0.29 * 100 is 28.999... in floating point and must count as 29


class Places(NamedTuple):
    """The kept tokens: M of each example, in order."""

    indices: Tensor  # (B, M) integer
    valid: Tensor | None  # (B, M) bool, False for padding; None means no padding
    rows: Tensor | None = None  # (B * M,) integer: if known, ``indices`` into the flattened batch
    slots: Tensor | None = None  # (B, T) int32: if known, each token's index among the kept tokens, or -1

    def kept(self, like: Tensor) -> Tensor:
        """(B, T) bool, as ``like``: the mask of kept tokens."""
        length = like.shape[1]
        at = self.indices if self.valid is None else torch.where(self.valid, self.indices, length)
        return nn.functional.pad(torch.zeros_like(like), (0, 1)).scatter(1, at, True)[:, :length]


def floor_share(lengths: Length, share: float) -> Length:
    """floor(share * length) of an int or of (B,) integer; at least 1 for a non-empty example."""
    if isinstance(lengths, int):
        return max(math.floor(lengths * share + _SLACK), min(lengths, 1))
    kept = torch.floor(lengths.double() * share + _SLACK).long()
    return torch.maximum(kept, lengths.clamp(max=1))


def token_budgets(config: RetentionConfig, lengths: Length, gates: int) -> list[Length]:
    """M of each gate (Eq. 2), non-increasing from gate to gate; each an int or (B,) integer.

    Args:
        lengths: number of tokens of each example without padding, an int or (B,) integer.
        gates: the number of gates.
    """
    if config.schedule == "profile":
        return [floor_share(lengths, share) for share in config.profile_shares]
    budgets = [floor_share(lengths, config.budget)]
    for _ in range(gates - 1):
        last = budgets[-1]
        budgets.append(floor_share(last, config.budget) if config.schedule == "geometric" else last)
    return budgets


def active_gates(config: RetentionConfig, places: Sequence[int]) -> tuple[int, ...]:
    """The places at which a gate can drop something; with a constant budget only the first."""
    if config.schedule == "constant":
        return tuple(places[:1])
    if config.schedule == "geometric":
        return tuple(places)
    shares = config.profile_shares
    return tuple(p for i, p in enumerate(places) if shares[i] < (shares[i - 1] if i else 1.0))


def keep_top(scores: Tensor, candidates: Tensor, protected: Tensor, budget: Tensor) -> Tensor:
    """The top-M rule of Eq. 7.

    Protected candidates rank before all others; ties are broken in favour of the earlier position.

    Args:
        scores: (B, T) float; log-odds, because probabilities saturate and tie.
        candidates: (B, T) bool: tokens that are neither padding nor dropped by an earlier gate.
        protected: (B, T) bool.
        budget: (B,) integer.

    Returns:
        (B, T) bool: the kept tokens, at most ``budget`` of each example's candidates.
    """
    order = _sort_best_first(scores, candidates, protected)
    best = torch.arange(order.shape[1], device=order.device) < budget[:, None]
    return torch.zeros_like(candidates).scatter(1, order, best) & candidates


def top_indices(
    scores: Tensor, candidates: Tensor | None, protected: Tensor, budget: Tensor | None, width: int
) -> Places:
    """The indices of the tokens that :func:`keep_top` keeps, computed without a mask.

    Args:
        scores: (B, T) float. protected: (B, T) bool.
        candidates: (B, T) bool; None means all.
        budget: (B,) integer, at most the number of candidates of each example; None means ``width`` for all.
        width: the largest budget.
    """
    best = _sort_best_first(scores, candidates, protected)[:, :width]
    if budget is None:
        return Places(best.sort(dim=1).values, None)
    length = scores.shape[1]
    chosen = torch.arange(width, device=best.device) < budget[:, None]
    places = torch.where(chosen, best, length).sort(dim=1).values  # padding at the end
    return Places(places.clamp(max=length - 1), places < length)


def _sort_best_first(scores: Tensor, candidates: Tensor | None, protected: Tensor) -> Tensor:
    """(B, T) integer: each example's positions, sorted; protected candidates first, non-candidates last."""
    limit = torch.finfo(torch.float32).max
    key = scores.detach().float().clamp(-limit, limit)
    key = key.masked_fill(protected, torch.inf)
    if candidates is not None:
        key = key.masked_fill(~candidates, -torch.inf)
    return key.sort(dim=1, descending=True, stable=True).indices


def compact(mask: Tensor, width: int) -> Places:
    """The indices of the true entries of ``mask``, (B, T) bool, at most ``width`` in each row."""
    order = (~mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :width]
    return Places(order, torch.arange(width, device=mask.device) < mask.sum(1, keepdim=True))


def take(x: Tensor, indices: Tensor, rows: Tensor | None = None) -> Tensor:
    """Gathers ``indices`` (B, M) integer along the second dimension of ``x`` (B, T, ...) in one copy of rows.

    ``rows`` is the result of :func:`flat_rows`, if known. The dtype of ``x`` is kept.
    """
    rows = flat_rows(indices, x.shape[1]) if rows is None else rows
    return x.reshape(-1, *x.shape[2:]).index_select(0, rows).view(*indices.shape, *x.shape[2:])


def flat_rows(indices: Tensor, length: int) -> Tensor:
    """(B * M,) integer: ``indices`` (B, M) into examples of ``length`` tokens, as rows of the flat batch."""
    first = torch.arange(0, len(indices) * length, length, device=indices.device)
    return (indices + first[:, None]).view(-1)
