"""How well a pre-trained encoder tells masked tokens of held-out text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from acp_repro.training.step import autocast
from acp_repro.training.task import Trained

_ROWS = 32


@torch.no_grad()
def measure(trained: Trained) -> list[dict[str, Any]]:
    """One record: the mean loss of a masked token, and how many are told right; always the same masks."""
    task, model, draw = trained.task, trained.model.eval(), np.random.default_rng(0)
    pieces = range(min(task.sequences("heldout"), trained.measure.examples))
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
