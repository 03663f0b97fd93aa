"""The large attention weights of a few heads on one sequence (Figure 6, bottom)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from acp_repro.chain.paper import Quantity

from .decay import inputs_of_heads

if TYPE_CHECKING:
    from torch import Tensor

    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX

LARGE_WEIGHT = 0.1  # Figure 6: A is very sparse, so only entries over this are shown
# Scores alive at a time: 32 MiB of float64, where a whole A of 16k tokens would take 2 GiB.
_CHUNK_SCORES = 2**22


def measure(trained: TrainedFoX, heads: Sequence[tuple[int, int]] | None = None) -> list[dict]:
    """One record for each entry of A over 0.1, rows in order, of the heads of :mod:`.decay`.

    A is exact (Equation 2), from the numbers that the model multiplies, in float64 by the reference.
    What ACP prunes of it is under epsilon, far under the 0.1 that an entry needs to be recorded.

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


def large_weights(
    inputs: AttentionInputs, above: float = LARGE_WEIGHT, chunk_scores: int = _CHUNK_SCORES
) -> Iterator[tuple[int, int, float]]:
    """(query, key, weight) of every entry of A over ``above``, of one head of one sequence.

    Args:
        inputs: batch and heads of 1.
        chunk_scores: entries of A that are held at a time, at least one row.
    """
    import torch

    from acp_repro.attention.reference import attention_scores

    q, k, log_fgate = inputs.q.double(), inputs.k.double(), inputs.log_fgate
    length, head_dim = q.shape[2:]
    rows = max(1, chunk_scores // length)
    for first in range(0, length, rows):
        last = min(length, first + rows)
        # The reference takes queries as the last positions of the keys, so keys end with the chunk.
        scores = attention_scores(
            q[:, :, first:last], k[:, :, :last], log_fgate[:, :, :last], sm_scale=1 / math.sqrt(head_dim)
        )
        weights: Tensor = scores[0, 0].softmax(-1)
        entries = torch.nonzero(weights > above)
        values = weights[tuple(entries.T)].tolist()
        for (query, key), value in zip(entries.tolist(), values, strict=True):
            yield first + query, key, value


QUANTITY = Quantity(
    "attention_weights",
    "layer head query_position key_position attention_weight",
    measure,
    lambda suite: [suite.heads_run],
    group="heads",
    large=True,
    options=("heads",),
)
