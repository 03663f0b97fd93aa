"""Downstream tasks of the LM Evaluation Harness (Tables 1 and 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.chain.paper import Quantity

if TYPE_CHECKING:
    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a task and metric, with the standard error of sampling its items.

    ``value`` and ``standard_error`` are shares for accuracies, and perplexities or bits per byte for those.
    ``begins_with_bos`` is missing in records of prompts that did not.
    """
    from ..evaluation.evaluation import HARNESS_VERSION
    from ..evaluation.of_run import evaluate_run

    results = trained.once(evaluate_run)
    return [
        {
            "task": result.task,
            "metric": name,
            "value": metric.value,
            "standard_error": metric.standard_error,
            "items": result.items,
            "truncated_requests": result.truncated,
            "source": result.source,
            "harness_version": HARNESS_VERSION,
            "begins_with_bos": True,
        }
        for result in results
        for name, metric in result.metrics.items()
    ]


LIBRARY = ("lm_eval", "eval")  # the library and our extra
QUANTITY = Quantity(
    "lm_eval",
    "task metric value standard_error items truncated_requests source harness_version begins_with_bos",
    measure,
    lambda suite: suite.in_order(suite.evaluated("pro"), suite.evaluated("llama")),
    group="lm_eval",
    library=LIBRARY,
    later=("begins_with_bos",),
)
