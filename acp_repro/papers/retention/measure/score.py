"""The scores of a model as it was trained, on the splits to choose by and to report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.chain.paper import Quantity

if TYPE_CHECKING:
    from ..trained import TrainedRetention


def measure(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a split and score, tokens removed as at inference."""
    records = []
    for split in ("dev", "test"):
        found = trained.evaluate(trained.model, split)
        records += [
            {
                "split": split,
                "metric": name,
                "score_percent": value,
                "loss_nats": found.loss_nats,
                "measured_examples": found.examples,
                "kept_share": found.kept_share,
            }
            for name, value in found.scores.items()
        ]
    return records


QUANTITY = Quantity(
    "score",
    "split metric score_percent loss_nats measured_examples kept_share",
    measure,
    lambda suite: suite.tuned,
)
