"""The decay c and the pruning boundary of a few heads on one sequence (Figures 1 and 6, top)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import Quantity

from . import pruned_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX

_START_TOKENS = 1024  # windows of some hundred tokens show here, and nowhere later


class Head(NamedTuple):
    """Both counted from 0."""

    layer: int
    head: int


def measure(trained: TrainedFoX, heads: Sequence[tuple[int, int]] | None = None) -> list[dict]:
    """One record a position and head, on the first held-out sequence of the run's context length.

    ``first_kept_key_position`` is the first token of key block n_m, where m is the position's query block.
    ``pruned_ratio`` is of this head on this sequence. ``threshold_nats`` is delta, missing for exact
    attention.

    Args:
        heads: (layer, head) pairs, recorded in this order; None chooses by savings, most local
            first (:func:`choose_heads`).

    Raises:
        RecordError: the model does not have a head, or prunes nothing to choose heads by.
    """
    from acp_repro.attention.decay import cumulative_log_fgate

    records: list[dict[str, Any]] = []
    for head, inputs in inputs_of_heads(trained, heads):
        block_q, block_k = inputs.grid()
        length = inputs.q.shape[2]
        boundary = inputs.boundary(block_q, block_k)
        ratio = inputs.count().pruned_ratio.item()
        delta = None if inputs.threshold is None else inputs.threshold.item()
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
    """The most local head, one whose boundary shows at the start, one halfway, and the most global one.

    Pruning with a window of some hundred tokens shows in the first blocks (Figure 1). At long contexts the
    head halfway prunes nothing there, and a local head all that it can. Halfway is the mean of the largest
    and the smallest saving, because in a bimodal distribution the median head would be one more local head.
    In a tie the first head in order of layers is taken.

    Args:
        savings: each head's pruned ratio.
        start: each head's pruned blocks in the first rows of blocks.

    Returns:
        Without repetition, the most local first.
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


def inputs_of_heads(
    trained: TrainedFoX, heads: Sequence[tuple[int, int]] | None
) -> list[tuple[Head, AttentionInputs]]:
    """Each head with the inputs of its attention on the first sequence: batch and heads of 1.

    Raises:
        RecordError: see :func:`measure`.
    """
    config = trained.model.config
    if heads is None:
        heads = trained.once(_heads_by_savings)
    for layer, head in heads:
        if layer >= config.num_hidden_layers or head >= config.num_heads:
            raise RecordError(
                f"{trained.run.name} has no head {layer}.{head}: layers are 0 to "
                f"{config.num_hidden_layers - 1}, heads 0 to {config.num_heads - 1}"
            )
    layers = trained.once(_first_sequence)
    return [(Head(*each), _one_head(layers[each[0]], each[1])) for each in heads]


def _heads_by_savings(trained: TrainedFoX) -> list[Head]:
    if trained.model.config.log_pruning_tolerance is None:
        raise RecordError(
            f"{trained.run.name} prunes nothing, so its heads cannot be chosen by savings; name them "
            "with --heads LAYER.HEAD, or a run with ACP as measure.heads_run of the suite"
        )
    records = trained.once(pruned_ratio.measure)
    start = {
        Head(layer, head): float(pruned)
        for layer, inputs in enumerate(trained.once(_first_sequence))
        for head, pruned in enumerate(_pruned_at_the_start(inputs))
    }
    return choose_heads({Head(r["layer"], r["head"]): r["pruned_ratio"] for r in records}, start)


def _pruned_at_the_start(inputs: AttentionInputs) -> Tensor:
    """(H,): each head's pruned blocks in the first thousand tokens."""
    block_q, block_k = inputs.grid()
    rows = max(1, _START_TOKENS // block_q)
    return inputs.boundary(block_q, block_k)[0, :, :rows].sum(-1)


def _first_sequence(trained: TrainedFoX) -> list[AttentionInputs]:
    """The inputs of every layer's attention, batch of 1."""
    from acp_repro.model.capture import attention_inputs
    from acp_repro.pipeline.training.step import autocast

    input_ids, _ = next(iter(trained.heldout_batches(trained.run.context_length, 1)))
    with autocast(trained.device, trained.run.training.dtype):
        return attention_inputs(trained.model, input_ids)


def _one_head(inputs: AttentionInputs, head: int) -> AttentionInputs:
    import torch

    from acp_repro.model.capture import AttentionInputs

    def of_head(x: Tensor) -> Tensor:
        return x[:, head : head + 1]

    threshold = inputs.threshold
    if threshold is not None:
        threshold = of_head(torch.broadcast_to(threshold, inputs.q.shape[:2]))
    return AttentionInputs(*map(of_head, (inputs.q, inputs.k, inputs.v, inputs.log_fgate)), threshold)


# Decay is c of Section 2.
QUANTITY = Quantity(
    "decay",
    "layer head pruned_ratio position cumulative_log_fgate_nats threshold_nats block_q_tokens "
    "block_k_tokens first_kept_key_position",
    measure,
    lambda suite: [suite.heads_run],
    group="heads",
    large=True,
    options=("heads",),
)
