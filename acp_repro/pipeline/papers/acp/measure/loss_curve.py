"""Held-out loss against the token's position in the context (Figures 3, 8 and 11, left)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import Quantity

from .loss import loss_by_position

if TYPE_CHECKING:
    from torch import Tensor

    from ..trained import TrainedFoX

WINDOW_TOKENS = 101  # Section 4.2 and Figure 3
MOST_POSITIONS = 1024  # a curve in print shows no more


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a position: the mean loss of the window of 101 positions centred there.

    Only positions whose window is wholly inside the context have a value, so the first is 50 (counted from 0)
    and the last L - 51. At most 1024 are kept: every s-th, with the smallest s that suffices.

    Raises:
        RecordError: the context is shorter than the window.
    """
    losses, tokens = trained.once(loss_by_position)
    if len(losses) < WINDOW_TOKENS:
        raise RecordError(
            f"loss_curve: {trained.run.name} has a context of {len(losses)} tokens, shorter than "
            f"the window of {WINDOW_TOKENS} over which the paper averages; measure loss instead"
        )
    means = moving_average(losses, WINDOW_TOKENS)
    step = -(-len(means) // MOST_POSITIONS)
    return [
        {
            "position": position + WINDOW_TOKENS // 2,
            "window_tokens": WINDOW_TOKENS,
            "measured_tokens": tokens,
            "loss_nats": float(means[position]),
        }
        for position in range(0, len(means), step)
    ]


def moving_average(values: Tensor, window: int) -> Tensor:
    """Means of all full windows: (L,) -> (L - window + 1,), same dtype; entry i is over i ... i + window
    - 1."""
    import torch

    return values.unfold(0, window, 1).mean(-1, dtype=torch.float64)


QUANTITY = Quantity(
    "loss_curve", "position window_tokens measured_tokens loss_nats", measure, group="losses", large=True
)
