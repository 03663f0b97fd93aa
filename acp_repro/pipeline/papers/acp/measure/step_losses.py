"""The loss of every step of a training. Two identical trainings have the same bits until they separate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity
from acp_repro.pipeline.state import read_log

if TYPE_CHECKING:
    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a step, with every digit of its mean loss and of its gradient's norm before clipping.

    Raises:
        RecordError: the run's folder has no log.
    """
    return [
        {name: line[name] for name in ("step", "tokens", "loss_nats", "grad_norm")}
        for line in read_log("step_losses", trained.run)
    ]


QUANTITY = Quantity(
    "step_losses",
    "step tokens loss_nats grad_norm",
    measure,
    lambda suite: suite.needle_trainings,
    large=True,
    optional=True,
)
