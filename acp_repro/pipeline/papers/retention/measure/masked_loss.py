"""How well a pre-trained encoder predicts masked tokens of held-out text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from acp_repro.common.gradients import without_gradients
from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from acp_repro.pipeline.training.task import Trained

_ROWS = 32


@without_gradients
def measure(trained: Trained) -> list[dict[str, Any]]:
    """One record: the mean loss of a masked token, and the share predicted right; always with the same
    masks."""
    from acp_repro.pipeline.training.step import autocast

    task, model, draw = trained.task, trained.model.eval(), np.random.default_rng(0)
    pieces = range(min(task.sequences("heldout"), trained.measure_settings.examples))
    loss, right, tokens = 0.0, 0, 0
    for first in range(0, len(pieces), _ROWS):
        given = task.masked("heldout", list(pieces[first : first + _ROWS]), draw)
        input_ids, labels = (x.to(trained.device) for x in given)
        with autocast(trained.device, trained.run.training.dtype):
            output = model(input_ids=input_ids, labels=labels)
        told = labels >= 0
        loss += float(output.loss) * int(told.sum())
        right += int((output.logits.argmax(-1) == labels)[told].sum())
        tokens += int(told.sum())
    return [
        {
            "masked_loss_nats": loss / tokens,
            "masked_accuracy_percent": 100 * right / tokens,
            "measured_tokens": tokens,
        }
    ]


QUANTITY = Quantity(
    "masked_loss",
    "masked_loss_nats masked_accuracy_percent measured_tokens",
    measure,
    lambda suite: suite.pretrained,
)
