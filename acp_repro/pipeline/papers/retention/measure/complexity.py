"""Complexity of a class under random retention (Appendix H), without a run."""

from __future__ import annotations

from acp_repro.pipeline.paper import Quantity

QUANTITY = Quantity(
    "complexity",
    "tokens kept_tokens repeats complexity complexity_ratio claimed_ratio root_ratio",
    command="python -m acp_repro.pipeline.papers.retention.simulations --suite {suite}",
)
