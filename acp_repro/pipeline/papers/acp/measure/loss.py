"""Mean held-out loss of a run as it was trained, with its own log_pruning_tolerance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from torch import Tensor

    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record: the mean over all positions of the held-out text, in nats a token."""
    losses, tokens = trained.once(loss_by_position)
    return [{"measured_tokens": tokens, "loss_nats": float(losses.mean())}]


def loss_by_position(trained: TrainedFoX) -> tuple[Tensor, int]:
    """Loss at every position of the context, averaged over sequences (Figure 3; Appendix B).

    Every context length of the suite reads the same text, whole pieces of the longest length. Ends of
    documents that do not fill one are left out.

    Returns:
        (L,) float64 on the CPU in nats, entry i for the token that follows i others (counted from 0);
        and the number of tokens measured.
    """
    import torch

    # The longest, if the shorter ones divide it.
    unit = math.lcm(*(run.context_length for run in trained.suite.runs))
    batches = trained.heldout_batches(trained.measure_settings.loss_tokens, same_text_as=unit)
    total, sequences = torch.zeros(trained.run.context_length, dtype=torch.float64, device=trained.device), 0
    for loss, _ in trained.losses(batches, "loss"):
        total += loss.sum(0, dtype=torch.float64)
        sequences += len(loss)
    return (total / sequences).cpu(), sequences * len(total)


QUANTITY = Quantity("loss", "measured_tokens loss_nats", measure, group="losses")
