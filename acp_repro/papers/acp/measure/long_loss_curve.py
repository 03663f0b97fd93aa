"""Held-out loss against the position in contexts of twice and four times the training length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.chain.errors import RecordError
from acp_repro.chain.paper import Quantity

from .loss import mean_by_position
from .loss_curve import WINDOW_TOKENS, curve

if TYPE_CHECKING:
    from ..trained import TrainedFoX

MULTIPLES = (2, 4)


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method, length and position; positions and windows as in ``loss_curve``.

    The method is the run's own. A run with ACP whose exact pair is not in the suite is also measured without
    pruning. Lengths are twice and four times that of training, as far as a held-out document is that long.
    All read the same tokens. delta follows the evaluated length (its log L).

    Raises:
        RecordError: no held-out document is twice as long as the training length, or that is shorter than the
            window.
        TooLong: a length does not fit in memory.
    """
    from ..fits import enough_memory

    run, longest_document = trained.run, trained.longest_heldout_document
    lengths = [m * run.context_length for m in MULTIPLES if m * run.context_length <= longest_document]
    if not lengths or lengths[0] < WINDOW_TOKENS:
        raise RecordError(
            f"long_loss_curve: {run.name} needs a held-out document of {2 * run.context_length} tokens (the "
            f"longest has {longest_document}), and windows of {WINDOW_TOKENS}; train with another context "
            "length, or hold out longer text"
        )
    records = []
    for method in trained.methods():
        for length in lengths:
            with enough_memory(length):
                found = mean_by_position(trained, f"loss at {length}, {method}", length, lengths[-1])
            records += [{"method": method, "evaluated_length_tokens": length, **row} for row in curve(*found)]
    return records


QUANTITY = Quantity(
    "long_loss_curve",
    "method evaluated_length_tokens position window_tokens measured_tokens loss_nats",
    measure,
    lambda suite: suite.needle_runs("pro", longest=True),
    large=True,
)
