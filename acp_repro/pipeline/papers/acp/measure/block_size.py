"""The cost of the block size: pruned ratio on grids from single entries to blocks of 256."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX

BLOCKS = (1, 16, 32, 64, 128, 256)


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a block size: pruned over causal blocks of B x B tokens, over all heads.

    Text and activations are the same for all. Only the grid changes on which Section 3's test is made. Blocks
    of one token prune all entries that any grid could prune. A larger block is kept whole for one entry; the
    difference is its cost.

    Raises:
        RecordError: the run has no ACP.
    """
    import torch

    if trained.model.config.log_pruning_tolerance is None:
        raise RecordError(
            f"block_size: {trained.run.name} prunes nothing; choose a run with ACP (--run NAME)"
        )
    pruned = torch.zeros(len(BLOCKS), dtype=torch.int64, device=trained.device)
    causal = [0] * len(BLOCKS)

    def see(layer: int, inputs: AttentionInputs) -> None:
        for index, block in enumerate(BLOCKS):
            count = inputs.count(block, block)
            pruned[index] += count.pruned.sum()
            causal[index] += count.causal * count.pruned.numel()

    _, tokens = trained.one_pass(see, "blocks")
    return [
        {"block_tokens": block, "measured_tokens": tokens, "pruned_ratio": part / whole}
        for block, part, whole in zip(BLOCKS, pruned.tolist(), causal, strict=True)
    ]


QUANTITY = Quantity(
    "block_size", "block_tokens measured_tokens pruned_ratio", measure, lambda suite: [suite.sweep_run]
)
