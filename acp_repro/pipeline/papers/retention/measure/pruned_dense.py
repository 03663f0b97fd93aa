"""A dense model pruned at inference only: at random and by H2O, at every place and budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

from ..settings import GATES

if TYPE_CHECKING:
    from ..trained import TrainedRetention

PRUNINGS = ("random", "h2o")


def measure(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a pruning, place of the gate, budget and score, on the test split; ``none`` is the dense
    model."""
    plain = trained.evaluate(trained.model, "test")
    records = _records("none", "none", 1.0, plain)
    for gates in GATES:
        for pruning in PRUNINGS:
            for budget in trained.measure_settings.budgets:
                model = trained.pruned(method=pruning, gates=gates, budget=budget)
                records += _records(pruning, gates, budget, trained.evaluate(model, "test"))
    return records


def _records(pruning: str, gates: str, budget: float, found) -> list[dict[str, Any]]:
    return [
        {
            "pruning": pruning,
            "pruning_gates": gates,
            "pruning_budget": budget,
            "metric": name,
            "score_percent": value,
            "loss_nats": found.loss_nats,
            "measured_examples": found.examples,
            "kept_share": found.kept_share,
        }
        for name, value in found.scores.items()
    ]


QUANTITY = Quantity(
    "pruned_dense",
    "pruning pruning_gates pruning_budget metric score_percent loss_nats measured_examples kept_share",
    measure,
    lambda suite: suite.dense,
)
