"""Pruned blocks on held-out text: the saving in FLOPs and memory accesses (Figure 2), at any block size."""

from __future__ import annotations

from typing import Any

import torch
from tqdm import tqdm

from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.pipeline.training.step import autocast

from ..trained import TrainedFoX

BLOCKS = (1, 16, 32, 64, 128, 256)


def measure_pruned_ratio(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a head: pruned and causal blocks of the forward grid, summed over the text.

    The ratio of both approximates the saving (Section 4.1; Appendix B says on how much text).
    """
    config = trained.model.config
    pruned = torch.zeros(config.num_hidden_layers, config.num_heads, dtype=torch.int64)
    grid, causal, tokens = (0, 0), 0, 0

    def see(layer: int, inputs: AttentionInputs) -> None:
        nonlocal grid, causal
        grid, count = inputs.grid(), inputs.count()
        pruned[layer] += count.pruned.sum(0).cpu()
        if layer == 0:
            causal += count.causal * len(count.pruned)

    batches = trained.heldout_batches(trained.measure_settings.pruned_ratio_tokens)
    with torch.no_grad(), watch_attention(trained.model, see):
        for input_ids, _ in tqdm(batches, desc=f"{trained.run.name}: pruned ratio", unit="batch"):
            with autocast(trained.device, trained.run.training.dtype):
                trained.model.model(input_ids)
            tokens += input_ids.numel()
    return [
        {
            "layer": layer,
            "head": head,
            "measured_tokens": tokens,
            "block_q_tokens": grid[0],
            "block_k_tokens": grid[1],
            "pruned_blocks": int(pruned[layer, head]),
            "causal_blocks": causal,
            "pruned_ratio": float(pruned[layer, head]) / causal,
        }
        for layer in range(config.num_hidden_layers)
        for head in range(config.num_heads)
    ]


def measure_block_size(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a block size: pruned over causal blocks of B x B tokens, over all heads, on the same
    activations.

    Blocks of one token prune all entries that any grid could prune; the difference is a larger block's cost.
    """
    assert trained.model.config.log_pruning_tolerance is not None, "a run that prunes nothing"
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
