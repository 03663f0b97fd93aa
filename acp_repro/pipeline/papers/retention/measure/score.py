"""The scores of a model as it was trained, on the dev and the test split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from ..trained import TrainedRetention

RIGHT, WRONG = "+-"


def measure(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a split and score; tokens are removed as at inference.

    If a score is the share of right answers, ``items_right`` has one character an example, in the set's
    order. ``items_hash`` is the hash of the set, because runs are compared example by example.
    """
    records, known = [], trained.texts.labelled.identity[:12]
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
                "items_hash": known,
                "items_right": _signs(found.right.get(name)),
            }
            for name, value in found.scores.items()
        ]
    return records


def _signs(right: Sequence[bool] | None) -> str | None:
    return None if right is None else "".join(RIGHT if each else WRONG for each in right)


QUANTITY = Quantity(
    "score",
    "split metric score_percent loss_nats measured_examples kept_share items_hash items_right",
    measure,
    lambda suite: suite.tuned,
    later=("items_hash", "items_right"),
)
