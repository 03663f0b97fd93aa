"""The share of tokens that each schedule keeps after each block, on the lengths of the test split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from ..trained import TrainedRetention


def measure(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a schedule and block: the tokens that are left, over all tokens; block 0 is the embedding.

    The schedules are ``constant`` and ``geometric`` at the run's budget. If the encoder has as many blocks,
    the shares of Table 5 or 6 at that budget are added.
    """
    import torch

    from acp_repro.retention import PROFILES, token_budgets

    layers = trained.model.config.num_hidden_layers
    lengths = torch.tensor([len(row.ids) for row in trained.texts.encoded("test")])
    table = {6: "table5", 12: "table6"}.get(layers)
    name = f"{table}_{100 * trained.run.budget:g}"
    schedules: dict[str, dict[str, Any]] = {"constant": {}, "geometric": {}}
    if name in PROFILES:
        schedules["profile"] = {"profile": name}
    records = []
    for schedule, more in schedules.items():
        config = trained.run.retention_config(schedule=schedule, gates="after_blocks", **more)
        kept = [lengths, *token_budgets(config, lengths, layers)]
        records += [
            {
                "schedule": schedule,
                "layer": layer,
                "kept_share": int(each.sum()) / int(lengths.sum()),
                "measured_examples": len(lengths),
            }
            for layer, each in enumerate(kept)
        ]
    return records


QUANTITY = Quantity(
    "tokens_kept", "schedule layer kept_share measured_examples", measure, lambda suite: suite.adaptive
)
