"""Savings, loss and the largest pruned mass against epsilon (Section 4.3, Figure 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acp_repro.attention.boundary import count_blocks, token_level_pruned_ratio
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.chain.provenance import commit, device_name
from acp_repro.model import FoXForCausalLM, load_pretrained
from acp_repro.model.capture import AttentionInputs
from acp_repro.model.loss import IGNORED_LABEL

from ..checkpoint_folder import Checkpoint
from ..trained import TrainedFoX
from .passes import one_pass
from .pruned_mass import pruned_row_mass

Batches = Iterable[tuple[Tensor, Tensor]]
_CHECKPOINT_BATCH_TOKENS = 8192


def sweep(
    model: FoXForCausalLM,
    batches: Callable[[], Batches],
    log_pruning_tolerances: Iterable[float],
    *,
    dtype: str,
    description: str,
) -> list[dict[str, Any]]:
    """One record for each epsilon, from a pass of the model that prunes with it.

    Ratios are over all heads and layers: ``block_pruned_ratio`` on the code's own grid,
    ``token_pruned_ratio`` what pruning entry by entry would save. ``largest_pruned_mass`` is the most
    attention weight that any row of any head loses to pruned blocks; missing if nothing is pruned.

    Args:
        batches: gives (input_ids, labels) batches of sequences of one length anew for each epsilon.
        log_pruning_tolerances: log epsilon, each negative.
        dtype: ``bfloat16`` or ``float32``, see :func:`acp_repro.papers.acp.measure.passes.one_pass`.
        description: what the progress bars say first.

    Raises:
        ValueError: an epsilon that the model refuses, or no text.
    """
    before, values = model.config.log_pruning_tolerance, list(log_pruning_tolerances)
    for value in values:  # a wrong one fails here, before minutes of work
        dataclasses.replace(model.config, log_pruning_tolerance=value)
    try:
        return [_at(model, batches(), value, dtype, description) for value in values]
    finally:
        model.set_log_pruning_tolerance(before)


def _at(model, batches: Batches, value: float, dtype: str, description: str) -> dict[str, Any]:
    """The record at log epsilon = ``value``; leaves the model with that epsilon."""
    model.set_log_pruning_tolerance(value)
    blocks: list[Tensor] = []
    tokens: list[Tensor] = []
    masses: list[Tensor] = []

    def see(layer: int, inputs: AttentionInputs) -> None:
        grid, length = inputs.grid(), inputs.q.shape[2]
        boundary = inputs.boundary(*grid)
        blocks.append(count_blocks(boundary, length, length, *grid).pruned_ratio.flatten())
        threshold = inputs.threshold.expand(inputs.q.shape[:2])
        c = cumulative_log_fgate(inputs.log_fgate)
        tokens.append(token_level_pruned_ratio(c, threshold).flatten())
        # -1 stands for a missing mass until the end: a maximum must not be NaN.
        masses.append(pruned_row_mass(inputs, boundary, *grid).nan_to_num(nan=-1.0).max())

    loss, measured = one_pass(
        model, batches, see, dtype=dtype, description=f"{description}, log epsilon {value:g}"
    )
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


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each of the suite's ``measure.sweep_log_pruning_tolerances``; see :func:`sweep`."""
    run = trained.run
    rows = trained.rows
    return sweep(
        trained.model,
        lambda: trained.heldout_batches(trained.measure.sweep_tokens, rows),
        trained.measure.sweep_log_pruning_tolerances,
        dtype=run.training.dtype,
        description=run.name,
    )


def sweep_checkpoint(
    folder: str | Path,
    log_pruning_tolerances: Iterable[float],
    device: torch.device,
    *,
    context_length: int | None = None,
    tokens: int = 32_768,
    text: str | Path | None = None,
    token_ids: str | Path | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """:func:`sweep` of any FoX checkpoint on any text, under bfloat16 autocast on a GPU.

    Args:
        folder, tokens, text, token_ids: see :class:`acp_repro.papers.acp.checkpoint_folder.Checkpoint`.
        context_length: default: the run's, if it is one of ours, else 4096.

    Returns:
        the records, and where they come from.

    Raises:
        CheckpointNotUsable, DataError, ValueError, FileNotFoundError: one line that names what to do.
    """
    checkpoint = Checkpoint.find(folder)
    if text is not None and token_ids is not None:
        raise ValueError("give text or token_ids (--text, --token-ids), not both")
    length = checkpoint.context_length or 4096 if context_length is None else context_length
    if length < 1:
        raise ValueError(f"context_length (--context-length) must be at least 1, got {length}")
    input_ids = checkpoint.input_ids(length, tokens, text=text, token_ids=token_ids)
    dtype = checkpoint.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    # The token after a sequence's last is not among input_ids, so that position has no loss.
    labels = input_ids.roll(-1, 1)
    labels[:, -1] = IGNORED_LABEL
    rows = max(1, _CHECKPOINT_BATCH_TOKENS // length)
    records = sweep(
        load_pretrained(checkpoint.folder, device=device),
        lambda: [
            (ids.to(device), wanted.to(device))
            for ids, wanted in zip(input_ids.split(rows), labels.split(rows), strict=True)
        ],
        log_pruning_tolerances,
        dtype=dtype,
        description=str(checkpoint.folder),
    )
    return records, {
        "checkpoint": str(checkpoint.folder),
        "text": str(token_ids or text or "held-out"),
        "context_length_tokens": length,
        "origin": "measured",
        "device": device_name(device),
        "dtype": dtype,
        "torch_version": torch.__version__,
        "commit": commit(),
    }
