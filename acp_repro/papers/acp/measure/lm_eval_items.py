"""Every item of the downstream tasks, for paired tests between models."""

from __future__ import annotations

from typing import Any

from ..evaluation.catalogue import COLUMNS
from ..evaluation.of_run import evaluate_run
from ..trained import TrainedFoX

_SHOWN = {(column.task, column.metric) for column in COLUMNS}


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record an item and metric of the columns of Tables 1 and 3.

    ``value`` is 1 or 0, right or wrong; of a perplexity the log-likelihood in nats, with the number of words
    that it is of in ``weight``, 1 where it is of one target.
    """
    return [
        {"task": result.task, "metric": name, "item": number, "value": value, "weight": weight}
        for result in trained.once(evaluate_run)
        for name, metric in result.metrics.items()
        if (result.task, name) in _SHOWN
        for number, (value, weight) in enumerate(metric.items)
    ]
