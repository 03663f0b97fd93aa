"""Savings, loss and the largest pruned mass against epsilon (Section 4.3, Figure 7)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from acp_repro.model.capture import AttentionInputs

from ..trained import TrainedFoX
from .pruned_mass import pruned_row_mass


def measure_epsilon_sweep(
    trained: TrainedFoX, log_pruning_tolerances: list[float] | None = None
) -> list[dict[str, Any]]:
    """One record for each epsilon, from a pass of the model that prunes with it; by default the suite's.

    ``block_pruned_ratio`` is on the code's own grid; ``token_pruned_ratio`` is what pruning entry by entry
    would save. ``largest_pruned_mass`` is the most attention weight that any row of any head loses to pruned
    blocks; missing if nothing is pruned.
    """
    config, before = trained.model.config, trained.model.config.log_pruning_tolerance
    values = log_pruning_tolerances or trained.measure_settings.sweep_log_pruning_tolerances
    for value in values:  # a wrong one fails here, before minutes of work
        dataclasses.replace(config, log_pruning_tolerance=value)
    try:
        return [_at(trained, value) for value in values]
    finally:
        trained.model.set_log_pruning_tolerance(before)


def _at(trained: TrainedFoX, value: float) -> dict[str, Any]:
    """The record at log epsilon = ``value``; leaves the model with that epsilon."""
    trained.model.set_log_pruning_tolerance(value)
    blocks: list[Tensor] = []
    tokens: list[Tensor] = []
    masses: list[Tensor] = []

    def see(layer: int, inputs: AttentionInputs) -> None:
        blocks.append(inputs.count().pruned_ratio.flatten())
        tokens.append(inputs.count(1, 1).pruned_ratio.flatten())
        # -1 stands for a missing mass until the end, because a maximum must not be NaN.
        masses.append(pruned_row_mass(inputs, *inputs.grid()).nan_to_num(nan=-1.0).max())

    loss, measured = trained.one_pass(see, f"log epsilon {value:g}")
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
