"""The large attention weights of a few heads on one sequence (Figure 6, bottom)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from acp_repro.pipeline.paper import Quantity

from .decay import inputs_of_heads
from .pruned_mass import row_chunks

if TYPE_CHECKING:
    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX

LARGE_WEIGHT = 0.1  # Figure 6: A is very sparse, so only entries over this are shown


def measure(trained: TrainedFoX, heads: Sequence[tuple[int, int]] | None = None) -> list[dict]:
    """One record for each entry of A over 0.1, rows in order, of the heads of :mod:`.decay`.

    A is exact (Equation 2), computed in float64 by the reference from the numbers that the model multiplies.
    ACP prunes less than epsilon of it, far below the 0.1 of a recorded entry.

    Args:
        heads: (layer, head) pairs; None chooses by savings, as ``decay`` does.

    Raises:
        RecordError: as in ``decay``.
    """
    return [
        {
            "layer": head.layer,
            "head": head.head,
            "query_position": query,
            "key_position": key,
            "attention_weight": weight,
        }
        for head, inputs in inputs_of_heads(trained, heads)
        for query, key, weight in large_weights(inputs)
    ]


def large_weights(inputs: AttentionInputs) -> Iterator[tuple[int, int, float]]:
    """(query, key, weight) of every entry of A over :data:`LARGE_WEIGHT`, of one head of one sequence.

    Args:
        inputs: batch and heads of 1.
    """
    import torch

    from acp_repro.attention.reference import attention_scores

    for rows in row_chunks(inputs):
        scores = attention_scores(rows.q, rows.k, rows.log_fgate, sm_scale=rows.sm_scale)
        weights = scores[0, 0].softmax(-1)
        entries = torch.nonzero(weights > LARGE_WEIGHT)
        values = weights[tuple(entries.T)].tolist()
        for (query, key), value in zip(entries.tolist(), values, strict=True):
            yield rows.start + query, key, value


QUANTITY = Quantity(
    "attention_weights",
    "layer head query_position key_position attention_weight",
    measure,
    lambda suite: [suite.heads_run],
    group="heads",
    large=True,
    options=("heads",),
)
