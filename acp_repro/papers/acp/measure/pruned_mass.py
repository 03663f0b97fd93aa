"""The attention weight that pruning discards in each row, in float64, compared with the bound of Appendix A,
and the slack of the threshold: how far it could be raised on this text without violating the bound."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from acp_repro.attention import reference
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.model import FoXForCausalLM
from acp_repro.model.capture import AttentionInputs
from acp_repro.pipeline.paper import with_columns

from ..trained import LabelledBatches, PassSettings, one_pass

# Float64 scores per chunk; the reference allocates about four such arrays.
_CHUNK_NUMBERS_GPU = 2**27
_CHUNK_NUMBERS_CPU = 2**19


class _Rows(NamedTuple):
    """Rows ``start`` to ``stop`` of every head, with the keys that they may attend to; float64."""

    start: int
    stop: int
    q: Tensor  # (B, H, stop - start, D)
    k: Tensor  # (B, H, stop, D)
    log_fgate: Tensor  # (B, H, stop)
    sm_scale: float


def row_chunks(inputs: AttentionInputs, block_q: int = 1) -> Iterator[_Rows]:
    """Yields all rows in chunks of whole query blocks, so that the dense reference fits in memory."""
    batch, heads, length, head_dim = inputs.q.shape
    budget = _CHUNK_NUMBERS_CPU if inputs.q.device.type == "cpu" else _CHUNK_NUMBERS_GPU
    size = block_q * max(1, budget // (batch * heads * length * block_q))
    for start in range(0, length, size):
        stop = min(length, start + size)
        q, k = inputs.q[:, :, start:stop].double(), inputs.k[:, :, :stop].double()
        yield _Rows(start, stop, q, k, inputs.log_fgate[..., :stop], 1.0 / math.sqrt(head_dim))


def pruned_row_mass(inputs: AttentionInputs, block_q: int, block_k: int) -> Tensor:
    """The attention weight (B, H, T) float64 that each row loses to pruned blocks, under its exact weights;
    NaN in rows that have no pruned block."""
    boundary = inputs.boundary(block_q, block_k)
    mass = torch.full(inputs.q.shape[:3], torch.nan, dtype=torch.float64, device=inputs.q.device)
    pruned = (boundary > 0).repeat_interleave(block_q, -1)[..., : inputs.q.shape[2]]
    for rows in row_chunks(inputs, block_q):
        here = slice(rows.start, rows.stop)
        if not pruned[..., here].any():
            continue
        n_m = boundary[..., rows.start // block_q : -(-rows.stop // block_q)]
        kept = reference.kept_entries(n_m, rows.stop - rows.start, rows.stop, block_q, block_k)
        chunk = reference.pruned_mass(rows.q, rows.k, rows.log_fgate, kept, sm_scale=rows.sm_scale)
        mass[..., here] = chunk.masked_fill(~pruned[..., here], torch.nan)
    return mass


def threshold_slack(
    inputs: AttentionInputs, block_q: int, block_k: int, log_pruning_tolerance: float
) -> Tensor:
    """The slack (B, H) in nats: how far delta could be raised on this text before a row loses epsilon.

    The slack is the largest s in [0, -delta] that preserves the bound: block pruning at the threshold
    delta + s keeps the pruned mass of every row below epsilon. Each query block m has a first key block that
    must not be pruned, and this block has a largest decay (0 if every block before the diagonal can be
    pruned). Therefore delta + s is the minimum of these decays over m.
    """
    batch, heads, length, _ = inputs.q.shape
    c = cumulative_log_fgate(inputs.log_fgate)
    highest = c.new_zeros(batch, heads)
    for rows in row_chunks(inputs, block_q):
        scores = reference.attention_scores(rows.q, rows.k, rows.log_fgate, sm_scale=rows.sm_scale)
        weights = F.pad(scores.softmax(-1), (0, -rows.stop % block_k))
        # The mass that a row loses if blocks 0 to l are pruned, then its maximum over the rows of a block.
        lost = weights.unflatten(-1, (-1, block_k)).sum(-1).cumsum(-1)
        lost = F.pad(lost, (0, 0, 0, (rows.start - rows.stop) % block_q))
        lost = lost.unflatten(2, (-1, block_q)).amax(3)  # (B, H, M of the chunk, N)
        first_needed = (lost < math.exp(log_pruning_tolerance)).sum(-1)
        first = torch.arange(rows.start, rows.stop, block_q, device=c.device)
        last = (first_needed * block_k + block_k - 1).clamp(max=length - 1)
        decay = c[..., first] - c.gather(-1, last)
        decay = decay.masked_fill(first_needed >= first // block_k, 0.0)
        highest = torch.minimum(highest, decay.amin(-1))
    return highest - inputs.threshold.expand(batch, heads).double()


@with_columns(
    "layer",
    "head",
    "measured_rows",
    "rows_with_pruning",
    "threshold_nats",
    "pruned_ratio",
    "largest_pruned_mass",
    "q99_pruned_mass",
    "q90_pruned_mass",
    "median_pruned_mass",
    "threshold_slack_nats",
)
def measure_pruned_mass(
    model: FoXForCausalLM, batches: LabelledBatches, settings: PassSettings
) -> list[dict[str, Any]]:
    """One record for each head, over all rows of the text, at the model's epsilon and on the kernel's grid.

    A pruned mass is a sum of attention weights, from 0 to 1. Maximum and quantiles are over the rows that
    have a pruned block. ``threshold_nats`` is the mean delta, and ``threshold_slack_nats`` the smallest
    :func:`threshold_slack` of the sequences.
    """
    config = model.config
    assert config.log_pruning_tolerance is not None, "a run that prunes nothing"
    shape = config.num_hidden_layers, config.num_heads
    masses: dict[tuple[int, int], list[np.ndarray]] = {index: [] for index in np.ndindex(shape)}
    slack = torch.full(shape, torch.inf, dtype=torch.float64)
    delta = torch.zeros(shape, dtype=torch.float64)
    pruned = torch.zeros(shape, dtype=torch.int64)
    causal = sequences = 0

    def see(layer: int, inputs: AttentionInputs) -> None:
        nonlocal causal, sequences
        grid, count, batch = inputs.grid(), inputs.count(), len(inputs.q)
        pruned[layer] += count.pruned.sum(0).cpu()
        mass = pruned_row_mass(inputs, *grid)
        for head in range(config.num_heads):
            masses[layer, head].append(mass[:, head][~mass[:, head].isnan()].cpu().numpy())
        found = threshold_slack(inputs, *grid, config.log_pruning_tolerance)
        slack[layer] = torch.minimum(slack[layer], found.amin(0).cpu())
        delta[layer] += inputs.threshold.expand(batch, -1).double().sum(0).cpu()
        if layer == 0:
            causal += batch * count.causal
            sequences += batch

    _, tokens = one_pass(model, batches, settings, see, "pruned mass")
    return [
        {
            "layer": layer,
            "head": head,
            "measured_rows": tokens,
            "threshold_nats": float(delta[layer, head]) / sequences,
            "pruned_ratio": int(pruned[layer, head]) / causal,
            **_distribution(np.concatenate(masses[layer, head])),
            "threshold_slack_nats": float(slack[layer, head]),
        }
        for layer, head in np.ndindex(shape)
    ]


def _distribution(masses: np.ndarray) -> dict[str, float | int | None]:
    quantiles = {"largest": 1.0, "q99": 0.99, "q90": 0.9, "median": 0.5}
    values = np.quantile(masses, [*quantiles.values()]).tolist() if len(masses) else [None] * 4
    return {
        "rows_with_pruning": len(masses),
        **{f"{n}_pruned_mass": v for n, v in zip(quantiles, values, strict=True)},
    }
