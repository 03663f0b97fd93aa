"""Pruned blocks on held-out text (Figure 2): of every head, at any block size, and against epsilon."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from acp_repro.common.command import progress_bar
from acp_repro.model import FoXForCausalLM
from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.training.trainer import autocast

from ..schema import SWEPT_LOG_PRUNING_TOLERANCES
from ..trained import LabelledBatches, PassSettings, one_pass
from .pruned_mass import pruned_row_mass

BLOCKS = (1, 16, 32, 64, 128, 256)


@with_columns(
    "layer",
    "head",
    "measured_tokens",
    "block_q_tokens",
    "block_k_tokens",
    "pruned_blocks",
    "causal_blocks",
    "pruned_ratio",
)
def measure_pruned_ratio(
    model: FoXForCausalLM, batches: LabelledBatches, settings: PassSettings
) -> list[dict[str, Any]]:
    """One record for each head: pruned and causal blocks of the forward grid, summed over the text.

    Their ratio approximates the saving (Section 4.1; Appendix B states the amount of text).
    """
    config = model.config
    pruned = torch.zeros(config.num_hidden_layers, config.num_heads, dtype=torch.int64)
    grid, causal, tokens = (0, 0), 0, 0

    def see(layer: int, inputs: AttentionInputs) -> None:
        nonlocal grid, causal
        grid, count = inputs.grid(), inputs.count()
        pruned[layer] += count.pruned.sum(0).cpu()
        if layer == 0:
            causal += count.causal * len(count.pruned)

    with torch.no_grad(), watch_attention(model, see):
        for input_ids, _ in progress_bar(batches, desc=f"{settings.name}: pruned ratio", unit="batch"):
            with autocast(input_ids.device, settings.dtype):
                model.model(input_ids)
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


@with_columns("block_tokens", "measured_tokens", "pruned_ratio")
def measure_block_size(
    model: FoXForCausalLM, batches: LabelledBatches, settings: PassSettings
) -> list[dict[str, Any]]:
    """One record for each block size: pruned divided by causal blocks of B x B tokens over all heads, on the
    same activations.

    Blocks of one token prune every entry that any grid can prune; the difference is the cost of larger
    blocks.
    """
    assert model.config.log_pruning_tolerance is not None, "a run that prunes nothing"
    pruned = torch.zeros(len(BLOCKS), dtype=torch.int64, device=next(model.parameters()).device)
    causal = [0] * len(BLOCKS)

    def see(layer: int, inputs: AttentionInputs) -> None:
        for index, block in enumerate(BLOCKS):
            count = inputs.count(block, block)
            pruned[index] += count.pruned.sum()
            causal[index] += count.causal * count.pruned.numel()

    _, tokens = one_pass(model, batches, settings, see, "blocks")
    return [
        {"block_tokens": block, "measured_tokens": tokens, "pruned_ratio": part / whole}
        for block, part, whole in zip(BLOCKS, pruned.tolist(), causal, strict=True)
    ]


@with_columns(
    "swept_log_pruning_tolerance",
    "block_pruned_ratio",
    "token_pruned_ratio",
    "loss_nats",
    "largest_pruned_mass",
    "measured_tokens",
)
def measure_epsilon_sweep(
    model: FoXForCausalLM,
    batches: LabelledBatches,
    settings: PassSettings,
    log_pruning_tolerances: list[float] | None = None,
) -> list[dict[str, Any]]:
    """One record for each epsilon (default: those of Figure 7), from a pass of the model with this epsilon.

    ``block_pruned_ratio`` refers to the kernel's grid; ``token_pruned_ratio`` is the saving of token-level
    pruning. ``largest_pruned_mass`` is the maximum attention weight that a row of any head loses to pruned
    blocks; it is missing if nothing is pruned.
    """
    config, before = model.config, model.config.log_pruning_tolerance
    values = log_pruning_tolerances or SWEPT_LOG_PRUNING_TOLERANCES
    for value in values:  # an invalid value fails here, before minutes of work
        dataclasses.replace(config, log_pruning_tolerance=value)
    try:
        return [_at_epsilon(model, batches, settings, value) for value in values]
    finally:
        model.set_log_pruning_tolerance(before)


def _at_epsilon(
    model: FoXForCausalLM, batches: LabelledBatches, settings: PassSettings, value: float
) -> dict[str, Any]:
    """The record at log epsilon = ``value``; leaves the model with that epsilon."""
    model.set_log_pruning_tolerance(value)
    blocks: list[Tensor] = []
    tokens: list[Tensor] = []
    masses: list[Tensor] = []

    def see(layer: int, inputs: AttentionInputs) -> None:
        blocks.append(inputs.count().pruned_ratio.flatten())
        tokens.append(inputs.count(1, 1).pruned_ratio.flatten())
        # -1 represents a missing mass until the end, because a maximum must not be NaN.
        masses.append(pruned_row_mass(inputs, *inputs.grid()).nan_to_num(nan=-1.0).max())

    loss, measured = one_pass(model, batches, settings, see, f"log epsilon {value:g}")
    largest = torch.stack(masses).max().item()
    # Every sequence has the same length, so the mean of ratios is the ratio of sums.
    return {
        "swept_log_pruning_tolerance": value,
        "block_pruned_ratio": torch.cat(blocks).mean().item(),
        "token_pruned_ratio": torch.cat(tokens).mean().item(),
        "loss_nats": loss,
        "largest_pruned_mass": largest if largest >= 0 else None,
        "measured_tokens": measured,
    }
