"""Variance of the gradient by the number of samples, on problems small enough for the exact answer."""

from __future__ import annotations

from acp_repro.pipeline.paper import Quantity

QUANTITY = Quantity(
    "variance",
    "batch_samples repeats gradient_variance",
    command="python -m acp_repro.pipeline.papers.retention.simulations --suite {suite}",
)
