"""Accuracy and ratios while the model was trained, from the run's own log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity
from acp_repro.pipeline.state import read_log

if TYPE_CHECKING:
    from ..trained import TrainedPruning

SINGLE = ("accuracy", "soft_accuracy")
BY_GATE = ("kept_ratio", "soft_ratio")


def measure(trained: TrainedPruning) -> list[dict[str, Any]]:
    """One record per watched step and series; a series of single gates has the gate, counted from 0.

    ``kept_ratio`` and ``soft_ratio`` are shares of the text's tokens before any gate.

    Raises:
        RecordError: the log of the run is missing, or the run was never watched.
    """
    rows = []
    for line in read_log("dynamics", trained.run):
        if "accuracy" not in line:
            continue
        common = {"step": line["step"], "loss_nats": line["loss_nats"]}
        rows += [{**common, "series": name, "gate_index": None, "value": line[name]} for name in SINGLE]
        for name in BY_GATE:
            rows += [
                {**common, "series": name, "gate_index": g, "value": v} for g, v in enumerate(line[name])
            ]
    return rows


QUANTITY = Quantity("dynamics", "step loss_nats series gate_index value", measure)
