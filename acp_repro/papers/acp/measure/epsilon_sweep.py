"""Savings, loss and the largest pruned mass against epsilon (Section 4.3, Figure 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from acp_repro.chain.paper import Quantity

from .pruned_mass import pruned_row_mass

if TYPE_CHECKING:
    from torch import Tensor

    from acp_repro.model import FoXForCausalLM
    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX

    Batches = Iterable[tuple[Tensor, Tensor]]


def sweep(
    model: FoXForCausalLM,
    batches: Callable[[], Batches],
    log_pruning_tolerances: Iterable[float],
    *,
    dtype: str,
    description: str,
) -> list[dict[str, Any]]:
    """One record for each epsilon, from a pass of the model that prunes with it.

    Ratios are over all heads and layers: ``block_pruned_ratio`` on the code's own grid,
    ``token_pruned_ratio`` what pruning entry by entry would save. ``largest_pruned_mass`` is the most
    attention weight that any row of any head loses to pruned blocks; missing if nothing is pruned.

    Args:
        batches: gives (input_ids, labels) batches of sequences of one length anew for each epsilon.
        log_pruning_tolerances: log epsilon, each negative.
        dtype: ``bfloat16`` or ``float32``, see :func:`acp_repro.papers.acp.passes.one_pass`.
        description: what the progress bars say first.

    Raises:
        ValueError: an epsilon that the model refuses, or no text.
    """
    before, values = model.config.log_pruning_tolerance, list(log_pruning_tolerances)
    for value in values:  # a wrong one fails here, before minutes of work
        dataclasses.replace(model.config, log_pruning_tolerance=value)
    try:
        return [_at(model, batches(), value, dtype, description) for value in values]
    finally:
        model.set_log_pruning_tolerance(before)


def _at(model, batches: Batches, value: float, dtype: str, description: str) -> dict[str, Any]:
    """The record at log epsilon = ``value``; leaves the model with that epsilon."""
    import torch

    from acp_repro.attention.boundary import count_blocks, token_level_pruned_ratio
    from acp_repro.attention.decay import cumulative_log_fgate

    from ..passes import one_pass

    model.set_log_pruning_tolerance(value)
    blocks: list[Tensor] = []
    tokens: list[Tensor] = []
    masses: list[Tensor] = []

    def see(layer: int, inputs: AttentionInputs) -> None:
        grid, length = inputs.grid(), inputs.q.shape[2]
        boundary = inputs.boundary(*grid)
        blocks.append(count_blocks(boundary, length, length, *grid).pruned_ratio.flatten())
        threshold = inputs.threshold.expand(inputs.q.shape[:2])
        c = cumulative_log_fgate(inputs.log_fgate)
        tokens.append(token_level_pruned_ratio(c, threshold).flatten())
        # -1 stands for a missing mass until the end: a maximum must not be NaN.
        masses.append(pruned_row_mass(inputs, boundary, *grid).nan_to_num(nan=-1.0).max())

    loss, measured = one_pass(
        model, batches, see, dtype=dtype, description=f"{description}, log epsilon {value:g}"
    )
    largest = torch.stack(masses).max().item()
    # Every sequence has the same length, so the mean of ratios is the ratio of sums.
    return {
        "swept_log_pruning_tolerance": value,
        "block_pruned_ratio": torch.cat(blocks).mean().item(),
        "token_pruned_ratio": torch.cat(tokens).mean().item(),
        "loss_nats": loss,
        "largest_pruned_mass": largest if largest >= 0 else None,
        "measured_tokens": measured,
    }


def measure(trained: TrainedFoX, log_pruning_tolerances: list[float] | None = None) -> list[dict[str, Any]]:
    """One record for each log epsilon, by default of the suite's ``measure.sweep_log_pruning_tolerances``;
    see :func:`sweep`."""
    run = trained.run
    rows = trained.rows
    return sweep(
        trained.model,
        lambda: trained.heldout_batches(trained.measure.sweep_tokens, rows),
        log_pruning_tolerances or trained.measure.sweep_log_pruning_tolerances,
        dtype=run.training.dtype,
        description=run.name,
    )


QUANTITY = Quantity(
    "epsilon_sweep",
    "swept_log_pruning_tolerance block_pruned_ratio token_pruned_ratio loss_nats "
    "largest_pruned_mass measured_tokens",
    measure,
    lambda suite: [suite.sweep_run],
)
