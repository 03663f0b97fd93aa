"""Pruned blocks of every head on held-out text: the saving in FLOPs and memory accesses (Figure 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from acp_repro.model.capture import AttentionInputs

    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a head: pruned and causal blocks of the forward grid, summed over the text.

    The ratio of both approximates the saving (Section 4.1; Appendix B says on how much text).
    """
    import torch

    from acp_repro.model.capture import watch_attention
    from acp_repro.pipeline.training.step import autocast

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


QUANTITY = Quantity(
    "pruned_ratio",
    "layer head measured_tokens block_q_tokens block_k_tokens pruned_blocks causal_blocks pruned_ratio",
    measure,
    lambda suite: suite.in_order(suite.select(acp=True), suite.arms),  # one arm trains with needles
)
