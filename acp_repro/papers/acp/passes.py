"""One pass of a model over held-out text: its loss, and a look at what every attention was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from acp_repro.model import FoXForCausalLM
from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.model.loss import IGNORED_LABEL
from acp_repro.training.step import autocast


def one_pass(
    model: FoXForCausalLM,
    batches: Iterable[tuple[Tensor, Tensor]],
    see: Callable[[int, AttentionInputs], None],
    *,
    dtype: str,
    description: str,
) -> tuple[float, int]:
    """Runs ``model`` over ``batches`` as it would run without being watched.

    Args:
        batches: (input_ids, labels), each (B, T) integer on the model's device; at least one. A label
            of -100 has no loss.
        see: called as ``see(layer, inputs)`` before every attention of every batch.
        dtype: ``bfloat16`` (autocast over the weights) or ``float32``.
        description: what the progress bar says.

    Returns:
        Mean loss in nats of the labels, and the number of tokens in ``input_ids``.

    Raises:
        ValueError: there is no batch, or no label.
    """
    total, labelled, tokens = 0.0, 0, 0
    with torch.no_grad(), watch_attention(model, see):
        for input_ids, labels in tqdm(batches, desc=description, unit="batch"):
            with autocast(input_ids.device, dtype):
                loss = model.loss_per_token(input_ids, labels)
            total += loss.double().sum().item()
            labelled += (labels != IGNORED_LABEL).sum().item()
            tokens += input_ids.numel()
    if not labelled:
        raise ValueError("no text to measure on: there is no label")
    return total / labelled, tokens
