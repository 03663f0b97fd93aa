"""The tokens that each schedule keeps, and the slack of the budget's constraint (Appendices C and G)."""

from typing import Any

import torch

from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.training.trainer import autocast
from acp_repro.retention import PROFILES, token_budgets
from acp_repro.retention.gates import open_logits

from ..texts import name_inputs
from ..trained import TrainedRetention

_ROWS = 32


@with_columns("schedule", "layer", "keep_ratio", "measured_examples")
def measure_tokens_kept(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record for each schedule and block: the keep ratio after the block; block 0 is the embedding.

    The schedules are ``constant`` and ``geometric`` at the run's budget. An encoder of 6 or 12 blocks also
    has the ``profile`` of Table 5 or 6 at this budget.
    """
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
                "keep_ratio": int(each.sum()) / int(lengths.sum()),
                "measured_examples": len(lengths),
            }
            for layer, each in enumerate(kept)
        ]
    return records


@with_columns(
    "gate",
    "multiplier",
    "unit",
    "counted_tokens",
    "open_tokens",
    "budget_tokens",
    "slack_tokens",
    "soft_loss_nats",
    "hard_loss_nats",
    "measured_examples",
)
@torch.no_grad()
def measure_slackness(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record for each gate, on examples of the training split, to which the bounds refer, without
    dropout.

    Token counts are means per example: ``counted_tokens`` is sum p (sigmoid of the score), ``open_tokens`` is
    sum P(z > 0), and ``slack_tokens`` is sum p - M. ``soft_loss_nats`` is the task's loss with sampled z, as
    in training. ``hard_loss_nats`` is the loss with top-M, which is feasible and therefore an upper bound of
    the least feasible loss F* of the appendices.
    """
    model, limit = trained.model.eval(), trained.measure_settings.examples
    retention = model.retention
    hard = trained.evaluate(model, "train", limit).loss_nats
    retention.configure(hard_from_step=None, open_steps=0)
    config = retention.config
    sums = torch.zeros(len(retention.places), 3, dtype=torch.float64)
    loss, examples = 0.0, 0
    torch.manual_seed(0)
    for rows in trained.texts.batches("train", _ROWS, limit):
        inputs = name_inputs(trained.texts.tensors(rows), trained.device)
        retention.train()  # only the gates: soft z, without dropout
        with autocast(trained.device, trained.run.training.dtype), retention.recorded() as records:
            output = model(**inputs)
        retention.eval()
        loss += float(output.loss) * len(rows)
        examples += len(rows)
        for index, record in enumerate(records):
            valid = ~torch.isnan(record.scores)
            free = valid.clone()
            free[:, 0] = False  # [CLS] counts as 1
            p = torch.sigmoid(record.scores)
            opened = torch.sigmoid(open_logits(record.scores, config.temperature, config.stretch))
            for column, share in enumerate((p, opened)):
                whole = torch.where(free, share, valid.to(share.dtype))
                sums[index, column] += float(torch.where(valid, whole, 0.0).sum())
            sums[index, 2] += float(record.budget.sum())
    means = (sums / examples).tolist()
    return [
        {
            "gate": place,
            "multiplier": float(multiplier),
            "unit": config.unit,
            "counted_tokens": counted,
            "open_tokens": opened,
            "budget_tokens": budget,
            "slack_tokens": counted - budget,
            "soft_loss_nats": loss / examples,
            "hard_loss_nats": hard,
            "measured_examples": examples,
        }
        for place, multiplier, (counted, opened, budget) in zip(
            retention.places, retention.multiplier.tolist(), means, strict=True
        )
    ]
