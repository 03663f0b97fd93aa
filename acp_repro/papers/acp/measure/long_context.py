"""One model far past the context length that it was trained with: savings and loss by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from acp_repro.chain.paper import Quantity

if TYPE_CHECKING:
    from acp_repro.data import TokenSequences
    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX

MULTIPLES = (1, 2, 4, 8)


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a length: pruned over causal blocks of all heads, and the mean loss of all tokens.

    Lengths are the training length (where it divides the longest) and the suite's
    ``measure.long_context_lengths``; where it gives none, 1, 2, 4 and 8 times the training length as far
    as a held-out document is long enough. Every length reads the very same tokens, those of documents
    that hold the longest one, so that only the context differs. delta follows the length evaluated (its
    log L).

    Raises:
        DataError: no held-out document is as long as a length that the suite asks for, or a length
            does not divide the longest.
    """
    from acp_repro.data import prepare

    corpus = prepare(trained.run.data)
    longest_document = int(np.diff(corpus.offsets("heldout")).max(initial=0))
    own = trained.run.context_length
    asked = trained.measure.long_context_lengths or [
        multiple * own for multiple in MULTIPLES if multiple == 1 or multiple * own <= longest_document
    ]
    own = [own] if max(asked) % own == 0 else []  # or it cannot read the same tokens
    lengths = sorted({*own, *asked})
    # The longest first: it is the one for which the text may be too short.
    records = [_at(trained, corpus.sequences("heldout", length), lengths[-1]) for length in lengths[::-1]]
    return records[::-1]


def _at(trained: TrainedFoX, sequences: TokenSequences, longest: int) -> dict[str, Any]:
    import torch

    from acp_repro.attention.boundary import causal_blocks, count_blocks

    from ..passes import one_pass

    run, length = trained.run, sequences.context_length
    pruned = torch.zeros((), dtype=torch.int64, device=trained.device)
    causal = 0

    def see(layer: int, inputs: AttentionInputs) -> None:
        nonlocal causal
        grid, (batch, heads, _, _) = inputs.grid(), inputs.q.shape
        pruned.add_(count_blocks(inputs.boundary(*grid), length, length, *grid).pruned.sum())
        causal += batch * heads * causal_blocks(length, length, *grid)

    # Whole sequences of the longest length, so that the budget cuts the text at the same place.
    budget = max(1, trained.measure.sweep_tokens // longest) * longest
    rows = max(1, run.training.micro_batch_tokens // length)
    batches = sequences.iter_batches(rows, budget, same_text_as=longest).to(trained.device)
    loss, tokens = one_pass(
        trained.model, batches, see, dtype=run.training.dtype, description=f"{run.name}: {length} tokens"
    )
    return {
        "evaluated_length_tokens": length,
        "measured_tokens": tokens,
        "pruned_ratio": pruned.item() / causal,
        "loss_nats": loss,
    }


QUANTITY = Quantity(
    "long_context",
    "evaluated_length_tokens measured_tokens pruned_ratio loss_nats",
    measure,
    lambda suite: [suite.sweep_run],
)
