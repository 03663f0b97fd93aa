"""A run's log as records, thinned: loss, speed and pruned share of each layer against the tokens trained."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import Quantity
from acp_repro.pipeline.state import read_log

if TYPE_CHECKING:
    from ..trained import TrainedFoX

MOST_POINTS = 100  # a figure in print shows no more


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each layer at every step kept; for an exact run one record a step, without a layer.

    Of the steps with the layers' pruned ratios (all steps of an exact run), every s-th and the last are kept,
    with the smallest s that gives at most 100. ``loss_nats`` is the mean training loss of the steps since the
    last kept one. ``throughput_tokens_per_s`` is their median, for all GPUs together.

    Raises:
        RecordError: the run's folder has no log, or none with pruned ratios.
    """
    run = trained.run
    lines = read_log("training_log", run)
    looks = [i for i, line in enumerate(lines) if run.log_pruning_tolerance is None or "pruned_ratio" in line]
    if not looks:
        raise RecordError(f"training_log: {run.folder}/metrics.jsonl has no pruned ratios; train it again")
    step = -(-len(looks) // MOST_POINTS)
    kept = looks[::-step][::-1]  # the last look always
    device = json.loads((run.folder / "run.json").read_text())["device"]
    records, since = [], 0
    for index in kept:
        line, window = lines[index], lines[since : index + 1]
        since = index + 1
        shared = {
            "step": line["step"],
            "tokens": line["tokens"],
            "averaged_steps": len(window),
            "loss_nats": statistics.fmean(x["loss_nats"] for x in window),
            "training_device": device,
            "throughput_tokens_per_s": statistics.median(x["throughput_tokens_per_s"] for x in window),
        }
        layers = enumerate(line.get("pruned_ratio", [None]))
        records += [
            {**shared, "layer": None if ratio is None else layer, "pruned_ratio": ratio}
            for layer, ratio in layers
        ]
    return records


QUANTITY = Quantity(
    "training_log",
    "step tokens layer pruned_ratio loss_nats averaged_steps training_device throughput_tokens_per_s",
    measure,
    lambda suite: suite.longest_trained,
    later=("throughput_tokens_per_s",),
)
