"""Every item of the downstream tasks, for paired tests between models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

from ..evaluation.catalogue import COLUMNS
from .lm_eval import LIBRARY, evaluate_run

if TYPE_CHECKING:
    from ..trained import TrainedFoX

_SHOWN = {(column.task, column.metric) for column in COLUMNS}


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record an item and metric of the columns of Tables 1 and 3.

    ``value`` is 1 or 0 for right or wrong. For a perplexity it is the log-likelihood in nats, and ``weight``
    is its number of words, 1 for a single target.
    """
    return [
        {"task": result.task, "metric": name, "item": number, "value": value, "weight": weight}
        for result in trained.once(evaluate_run)
        for name, metric in result.metrics.items()
        if (result.task, name) in _SHOWN
        for number, (value, weight) in enumerate(metric.items)
    ]


QUANTITY = Quantity(
    "lm_eval_items",
    "task metric item value weight",
    measure,
    lambda suite: suite.in_order(suite.evaluated("pro"), suite.evaluated("llama")),
    group="lm_eval",
    library=LIBRARY,
    large=True,
)
