"""Bias and variance of the relaxed gradient on problems small enough for the exact answer, without a run."""

from __future__ import annotations

from acp_repro.pipeline.paper import Quantity

QUANTITY = Quantity(
    "estimator",
    "relaxation swept_temperature problem tokens samples relative_bias relative_bias_error relative_variance",
    command="python -m acp_repro.pipeline.papers.retention.simulations --suite {suite}",
)
