"""Mean held-out loss of a run as it was trained, with its own log_pruning_tolerance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from acp_repro.chain.paper import Quantity

if TYPE_CHECKING:
    from torch import Tensor

    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record: the mean over all positions of the held-out text, in nats a token."""
    losses, tokens = trained.once(loss_by_position)
    return [{"measured_tokens": tokens, "loss_nats": float(losses.mean())}]


def loss_by_position(trained: TrainedFoX) -> tuple[Tensor, int]:
    """Loss at every position of the context, averaged over sequences (Figure 3; Appendix B).

    Every context length of the suite sees the same text, whole pieces of the longest: the documents'
    ends that do not fill one are left out.

    Returns:
        (L,) float64 on the CPU in nats, entry i for the token that follows i others (counted from 0);
        and the number of tokens measured.
    """
    run = trained.run
    unit = trained.common_length or run.context_length
    budget = max(1, trained.measure.loss_tokens // unit) * unit
    batches = trained.heldout_batches(budget, trained.rows, same_text_as=unit)
    return mean_by_position(trained, batches, run.context_length, f"{run.name}: loss")


def mean_by_position(
    trained: TrainedFoX, batches: Iterable[tuple[Tensor, Tensor]], length: int, description: str
) -> tuple[Tensor, int]:
    """Loss at each of ``length`` positions, averaged over the sequences of ``batches``.

    Returns:
        (length,) float64 on the CPU in nats; and the number of tokens measured.
    """
    import torch

    from acp_repro.training.step import autocast

    total = torch.zeros(length, dtype=torch.float64, device=trained.device)
    sequences = 0
    with torch.no_grad():
        for input_ids, labels in tqdm(batches, desc=description, unit="batch"):
            with autocast(trained.device, trained.run.training.dtype):
                loss = trained.model.loss_per_token(input_ids, labels)
            total += loss.sum(0, dtype=torch.float64)
            sequences += len(labels)
    return (total / sequences).cpu(), sequences * length


QUANTITY = Quantity("loss", "measured_tokens loss_nats", measure, group="losses")
