"""How many tokens are kept, and which: the budget M of Eq. 2 and the top-M rule of Eq. 7."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .config import RetentionConfig

Length = TypeVar("Length", int, Tensor)
_SLACK = 1e-6  # 0.29 * 100 is 28.999... in floating point, and means 29


class Places(NamedTuple):
    """The tokens that stay: M of each example, in order."""

    indices: Tensor  # (B, M) integer
    valid: Tensor | None  # (B, M) bool, False for filling; None means no filling
    rows: Tensor | None = None  # (B * M,) integer: if known, ``indices`` as rows of all examples together
    slots: Tensor | None = None  # (B, T) int32: if known, the place of a token among those that stay, or -1

    def kept(self, like: Tensor) -> Tensor:
        """(B, T) bool, as ``like``: the tokens that stay."""
        length = like.shape[1]
        at = self.indices if self.valid is None else torch.where(self.valid, self.indices, length)
        return nn.functional.pad(torch.zeros_like(like), (0, 1)).scatter(1, at, True)[:, :length]


def floor_share(lengths: Length, share: float) -> Length:
    """floor(share * length), at least 1 if there is a token; for an int, or for (B,) integer."""
    if isinstance(lengths, int):
        return max(math.floor(lengths * share + _SLACK), min(lengths, 1))
    kept = torch.floor(lengths.double() * share + _SLACK).long()
    return torch.maximum(kept, lengths.clamp(max=1))


def token_budgets(config: RetentionConfig, lengths: Length, gates: int) -> list[Length]:
    """M of each gate (Eq. 2), never rising from gate to gate: an int, or (B,) integer, each.

    Args:
        lengths: the examples' own tokens, without padding: an int, or (B,) integer.
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

    Protected candidates precede the largest scores. Of equal scores the earlier position has priority.

    Args:
        scores: (B, T) float; log-odds rather than probabilities, which saturate and tie.
        candidates: (B, T) bool: neither padding nor dropped before.
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
    """The places of the tokens that :func:`keep_top` keeps, found without a mask.

    Args:
        scores: (B, T) float. protected: (B, T) bool.
        candidates: (B, T) bool; None means all.
        budget: (B,) integer, at most the candidates of each example; None means ``width`` for every one.
        width: the largest budget.
    """
    best = _sort_best_first(scores, candidates, protected)[:, :width]
    if budget is None:
        return Places(best.sort(dim=1).values, None)
    length = scores.shape[1]
    chosen = torch.arange(width, device=best.device) < budget[:, None]
    places = torch.where(chosen, best, length).sort(dim=1).values  # filling to the end
    return Places(places.clamp(max=length - 1), places < length)


def _sort_best_first(scores: Tensor, candidates: Tensor | None, protected: Tensor) -> Tensor:
    """(B, T) integer: each example's places, protected candidates first and other than candidates last."""
    limit = torch.finfo(torch.float32).max
    key = scores.detach().float().clamp(-limit, limit)
    key = key.masked_fill(protected, torch.inf)
    if candidates is not None:
        key = key.masked_fill(~candidates, -torch.inf)
    return key.sort(dim=1, descending=True, stable=True).indices


def compact(mask: Tensor, width: int) -> Places:
    """The places of the true entries of ``mask``, (B, T) bool; a row has at most ``width`` of them."""
    order = (~mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :width]
    return Places(order, torch.arange(width, device=mask.device) < mask.sum(1, keepdim=True))


def take(x: Tensor, indices: Tensor, rows: Tensor | None = None) -> Tensor:
    """``x`` (B, T, ...) at ``indices`` (B, M) integer of its second dimension: one copy of whole rows, same
    dtype. ``rows`` are those of :func:`flat_rows`, if they are known."""
    rows = flat_rows(indices, x.shape[1]) if rows is None else rows
    return x.reshape(-1, *x.shape[2:]).index_select(0, rows).view(*indices.shape, *x.shape[2:])


def flat_rows(indices: Tensor, length: int) -> Tensor:
    """(B * M,) integer: ``indices`` (B, M) of examples of ``length`` tokens as rows of all examples
    together."""
    first = torch.arange(0, len(indices) * length, length, device=indices.device)
    return (indices + first[:, None]).view(-1)
