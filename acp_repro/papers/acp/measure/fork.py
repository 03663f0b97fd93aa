"""Trainings side by side, each step compared with the exact one; see papers/acp/fork.py."""

from __future__ import annotations

from acp_repro.chain.paper import Quantity

QUANTITY = Quantity(
    "fork",
    "training training_log_pruning_tolerance step tokens loss_nats loss_difference_nats "
    "differing_gradients gradient_difference gradient_norm_difference most_different_gradient "
    "weight_difference parts_here pruned_ratio largest_pruned_mass",
    large=True,
    command="python -m acp_repro.fork --suite {suite}",
)
