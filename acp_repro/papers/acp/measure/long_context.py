"""One model far beyond the context length of its training: savings and loss by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.chain.paper import Quantity

if TYPE_CHECKING:
    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX

MULTIPLES = (1, 2, 4, 8)


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a length: pruned over causal blocks of all heads, and the mean loss of all tokens.

    Lengths are the training length (if it divides the longest) and the suite's
    ``measure.long_context_lengths``. Without the latter they are 1, 2, 4 and 8 times the training length, as
    far as a held-out document is long enough. Every length reads exactly the same tokens, those of documents
    that hold the longest one, so that only the context differs. delta follows the evaluated length (its log
    L).

    Raises:
        DataError: no held-out document is as long as a length of the suite, or a length does not divide the
            longest.
    """
    own = trained.run.context_length
    longest_document = trained.longest_heldout_document
    asked = trained.measure_settings.long_context_lengths or [
        multiple * own for multiple in MULTIPLES if multiple == 1 or multiple * own <= longest_document
    ]
    own = [own] if max(asked) % own == 0 else []  # or it cannot read the same tokens
    lengths = sorted({*own, *asked})
    # The longest first, because the text may be too short for it.
    records = [_at(trained, length, lengths[-1]) for length in lengths[::-1]]
    return records[::-1]


def _at(trained: TrainedFoX, length: int, longest: int) -> dict[str, Any]:
    import torch

    pruned = torch.zeros((), dtype=torch.int64, device=trained.device)
    causal = 0

    def see(layer: int, inputs: AttentionInputs) -> None:
        nonlocal causal
        count = inputs.count()
        pruned.add_(count.pruned.sum())
        causal += count.causal * count.pruned.numel()

    batches = trained.heldout_batches(
        trained.measure_settings.sweep_tokens, length=length, same_text_as=longest
    )
    loss, tokens = trained.one_pass(see, f"{length} tokens", batches)
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
