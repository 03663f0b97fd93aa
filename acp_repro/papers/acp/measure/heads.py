"""The decay, boundary and large attention weights of a few heads on one sequence (Figures 1 and 6)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.attention.reference import attention_scores
from acp_repro.common.errors import UsageError
from acp_repro.model.capture import AttentionInputs, attention_inputs
from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.training.trainer import autocast

from ..trained import TrainedFoX
from .pruned_mass import row_chunks
from .pruned_ratio import measure_pruned_ratio

_START_TOKENS = 1024  # an effective context of some hundred tokens is visible only here
LARGE_WEIGHT = 0.1  # Figure 6: A is very sparse, so only larger entries are recorded


class Head(NamedTuple):
    """The indices of a layer and of a head in this layer, from 0."""

    layer: int
    head: int


@with_columns(
    "layer",
    "head",
    "pruned_ratio",
    "position",
    "cumulative_log_fgate_nats",
    "threshold_nats",
    "block_q_tokens",
    "block_k_tokens",
    "first_kept_key_position",
)
def measure_decay(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each position and head, on the first held-out sequence of the run's context length.

    ``first_kept_key_position`` is the first token of key block n_m, where m is the position's query block.
    The heads are those of :func:`choose_heads`.
    """
    records: list[dict[str, Any]] = []
    for head, inputs in trained.once(inputs_of_heads):
        block_q, block_k = inputs.grid()
        length = inputs.q.shape[2]
        boundary = inputs.boundary(block_q, block_k)
        ratio = inputs.count().pruned_ratio.item()
        delta = inputs.threshold.item()
        first_kept = (boundary.flatten() * block_k).repeat_interleave(block_q)[:length].tolist()
        c = cumulative_log_fgate(inputs.log_fgate).flatten().tolist()
        records += [
            {
                "layer": head.layer,
                "head": head.head,
                "pruned_ratio": ratio,
                "position": position,
                "cumulative_log_fgate_nats": c[position],
                "threshold_nats": delta,
                "block_q_tokens": block_q,
                "block_k_tokens": block_k,
                "first_kept_key_position": first_kept[position],
            }
            for position in range(length)
        ]
    return records


def choose_heads(savings: dict[Head, float], start: dict[Head, float]) -> list[Head]:
    """The most local head, a head whose boundary is visible in the first rows, an intermediate head, and the
    most global head.

    The function selects by the pruned ratio of each head (``savings``) and by its pruned blocks in the first
    rows (``start``), where an effective context of some hundred tokens is visible (Figure 1). The
    intermediate head is nearest to the mean of the largest and the smallest ratio, because the median of a
    bimodal distribution would be another local head. Ties select the first head in order of layers.
    """
    order = sorted(savings)
    most, least = max(order, key=savings.get), min(order, key=savings.get)

    def nearest_halfway(heads: list[Head], values: dict[Head, float]) -> list[Head]:
        halfway = (max(values.values()) + min(values.values())) / 2
        return sorted(heads, key=lambda head: abs(values[head] - halfway))[:1]

    between = [head for head in order if head not in (most, least)]
    chosen = dict.fromkeys((most, *nearest_halfway(between, savings), least))
    if len(set(start.values())) > 1:
        chosen |= dict.fromkeys(nearest_halfway(order, start))
    return sorted(chosen, key=lambda head: (-savings[head], head))


def inputs_of_heads(trained: TrainedFoX) -> list[tuple[Head, AttentionInputs]]:
    """Each chosen head with its attention inputs on the first sequence; batch and head dimensions are 1."""
    if trained.model.config.log_pruning_tolerance is None:
        raise UsageError(
            f"{trained.run.name} prunes nothing, so its heads cannot be chosen by pruned ratio; measure a "
            "run with ACP"
        )
    input_ids, _ = next(iter(trained.heldout_batches(trained.run.context_length, 1)))
    with autocast(trained.device, trained.run.training.dtype):
        layers = attention_inputs(trained.model, input_ids)
    start = {
        Head(layer, head): float(pruned)
        for layer, inputs in enumerate(layers)
        for head, pruned in enumerate(_pruned_at_the_start(inputs))
    }
    records = trained.on_heldout(measure_pruned_ratio, "pruned_ratio_tokens")
    savings = {Head(record["layer"], record["head"]): record["pruned_ratio"] for record in records}
    return [(head, _one_head(layers[head.layer], head.head)) for head in choose_heads(savings, start)]


def _pruned_at_the_start(inputs: AttentionInputs) -> Tensor:
    """The pruned blocks (H,) of each head in the first 1024 tokens."""
    block_q, block_k = inputs.grid()
    rows = max(1, _START_TOKENS // block_q)
    return inputs.boundary(block_q, block_k)[0, :, :rows].sum(-1)


def _one_head(inputs: AttentionInputs, head: int) -> AttentionInputs:
    def slice_head(x: Tensor) -> Tensor:
        return x[:, head : head + 1]

    threshold = slice_head(torch.broadcast_to(inputs.threshold, inputs.q.shape[:2]))
    return AttentionInputs(*map(slice_head, (inputs.q, inputs.k, inputs.v, inputs.log_fgate)), threshold)


@with_columns("layer", "head", "query_position", "key_position", "attention_weight")
def measure_attention_weights(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each entry of A above 0.1, in row order, of the heads of ``decay``. The reference
    computes the exact A (Equation 2) in float64 from the inputs of the model's attention."""
    return [
        {
            "layer": head.layer,
            "head": head.head,
            "query_position": query,
            "key_position": key,
            "attention_weight": weight,
        }
        for head, inputs in trained.once(inputs_of_heads)
        for query, key, weight in large_weights(inputs)
    ]


def large_weights(inputs: AttentionInputs) -> Iterator[tuple[int, int, float]]:
    """(query, key, weight) of every entry of A above :data:`LARGE_WEIGHT`, for one head of one sequence."""
    for rows in row_chunks(inputs):
        scores = attention_scores(rows.q, rows.k, rows.log_fgate, sm_scale=rows.sm_scale)
        weights = scores[0, 0].softmax(-1)
        entries = torch.nonzero(weights > LARGE_WEIGHT)
        values = weights[tuple(entries.T)].tolist()
        for (query, key), value in zip(entries.tolist(), values, strict=True):
            yield rows.start + query, key, value
