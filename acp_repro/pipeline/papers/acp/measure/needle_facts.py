"""The needle test with two dozen questions instead of one; ACP's weights are also tested without pruning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

from .needle import COLUMNS, try_mode

if TYPE_CHECKING:
    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method, context length, fact and depth; see ``needle.measure``.

    Fact i is hidden in haystack i modulo ``measure.needle_samples``. A run with ACP is tested as it was
    trained, and with pruning off. A difference between the two comes from the evaluation, not from training.
    """
    return try_mode(trained, "facts", trained.methods(both=True))


QUANTITY = Quantity(
    "needle_facts", COLUMNS, measure, lambda suite: suite.needle_trainings, large=True, optional=True
)
