"""The state of the budget's penalty: A, lambda and the gap of Appendices C and G, soft gates against hard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.common.gradients import without_gradients
from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from ..trained import TrainedRetention

_ROWS = 32


@without_gradients
def measure(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a gate, on examples of the training split, which the bounds are about; dropout is off.

    Tokens are means of an example. ``counted_tokens`` is sum p (sigmoid of the score), ``open_tokens`` is sum
    P(z > 0), ``slack_tokens`` is sum p - M. ``soft_loss_nats`` is the task's loss with sampled z, as in
    training. ``hard_loss_nats`` is the loss with top-M, which is feasible. So the least feasible loss F* of
    the appendices is at most that.
    """
    import torch

    from acp_repro.pipeline.training.step import autocast
    from acp_repro.retention.gates import open_logits

    from ..texts import inputs_of

    model, limit = trained.model.eval(), trained.measure_settings.examples
    retention = model.retention
    hard = trained.evaluate(model, "train", limit).loss_nats
    retention.configure(hard_from_step=None, open_steps=0)
    config = retention.config
    sums = torch.zeros(len(retention.places), 3, dtype=torch.float64)
    loss, examples = 0.0, 0
    torch.manual_seed(0)
    for rows in trained.texts.batches("train", _ROWS, limit):
        inputs = inputs_of(trained.texts.tensors(rows), trained.device)
        retention.train()  # the gates alone: soft z, without dropout
        with autocast(trained.device, trained.run.training.dtype), retention.recorded() as records:
            output = model(**inputs)
        retention.eval()
        loss += float(output.loss) * len(rows)
        examples += len(rows)
        for index, record in enumerate(records):
            valid = ~torch.isnan(record.scores)
            free = valid & (record.z.new_ones(()) > 0)
            free[:, 0] = False  # [CLS] counts whole
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


QUANTITY = Quantity(
    "slackness",
    "gate multiplier unit counted_tokens open_tokens budget_tokens slack_tokens soft_loss_nats "
    "hard_loss_nats measured_examples",
    measure,
    lambda suite: suite.adaptive,
)
