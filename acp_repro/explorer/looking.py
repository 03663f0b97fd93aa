"""What every head of a model does on one sequence, and the table of ``inspect`` with more columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.common.errors import UsageError
from acp_repro.explorer.heads import inspect_heads
from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.capture import AttentionInputs, watch_attention

from .weights import CHUNK_SCORES_CPU, CHUNK_SCORES_GPU, ROWS_OF_BASE, HeadWeights, cell_tokens, head_weights

STRONGEST = 8  # keys of each query that are kept


class NotToBeLookedAt(UsageError, ValueError):
    """The tokens are not the model's, too few, or too many for this machine; one line says what to do."""


@dataclass
class Head:
    """One head on the first sequence, on the CPU: its gates (T,) and sums of its attention weights."""

    layer: int
    head: int
    log_fgate: Tensor
    weights: HeadWeights


@dataclass
class ModelHeads:
    """A model's heads.

    Attributes:
        table: the frame of :func:`inspect_heads` over all sequences. It has more
            columns, from the first sequence alone: see :func:`look`.
        heads: in the table's order.
        input_ids: (T,) int64, the first sequence.
        cell: tokens of a square of :attr:`HeadWeights.cells`.
        grid: tokens of a query block and of a key block.
        own_log_pruning_tolerance: log epsilon of the model's config; None if it is exact.
    """

    table: pd.DataFrame
    heads: list[Head]
    input_ids: Tensor
    cell: int
    grid: tuple[int, int]
    own_log_pruning_tolerance: float | None

    @property
    def length(self) -> int:
        """Tokens of the first sequence."""
        return len(self.input_ids)

    def head(self, layer: int, head: int) -> Head:
        """The head of that layer and number.

        Raises:
            KeyError: there is none; the message says which there are.
        """
        for found in self.heads:
            if (found.layer, found.head) == (layer, head):
                return found
        last = self.heads[-1]
        raise KeyError(
            f"no head {head} in layer {layer}: layers are 0 to {last.layer}, heads 0 to {last.head}"
        )


def checked_ids(tokens: Tensor | Sequence[int], vocab_size: int) -> Tensor:
    """``tokens`` as int64 ids, (sequences, T).

    Raises:
        NotToBeLookedAt: they are not whole numbers of that shape, or not from 0 to ``vocab_size - 1``.
    """
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):  # such as a text, or sequences of several lengths
        ids = torch.empty(0)
    if ids.ndim not in (1, 2) or not ids.numel() or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise NotToBeLookedAt(
            "tokens must be ids, (T,) or (sequences, T); encode a text with the model's tokenizer first"
        )
    ids = torch.atleast_2d(ids.long())
    for wrong in (int(ids.min()), int(ids.max())):
        if not 0 <= wrong < vocab_size:
            raise NotToBeLookedAt(
                f"token id {wrong} is not from 0 to {vocab_size - 1}; take the tokenizer that the model was "
                "trained with"
            )
    return ids


@torch.no_grad()
def look(
    model: FoXForCausalLM,
    batches: Iterable[Tensor],
    *,
    log_pruning_tolerance: float | None = None,
    dtype: str = "float32",
) -> ModelHeads:
    """The heads of ``model`` on the first sequence of ``batches``, and their table over all of them.

    Memory grows with the length, never with its square.

    Args:
        batches: token ids, (B, T) int64 each.
        model, log_pruning_tolerance, dtype: of :func:`inspect_heads`, which makes
            the table.

    Returns:
        The heads. Their table has these columns besides those of ``inspect_heads``:

        - ``half_weight_tokens``: the distance within which half of the weight lies, in tokens;
        - ``strongest_weight``: the mean weight of a query's strongest key;
        - ``first_token_weight``: the mean weight on the first token;
        - ``largest_pruned_mass``: the most weight that pruning takes from a row;
        - ``map_x``, ``map_y``: where :func:`place_heads` puts the head.

    Raises:
        NotToBeLookedAt: sequences are shorter than two blocks, or too long for this machine's memory.
        ValueError: there is no batch, or sequences differ in length.
    """
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no batch to look at")
    length, device = first.shape[1], next(model.parameters()).device
    _check_memory(model.config, length, len(first), device)
    cell, found = cell_tokens(length), {}
    grid: list[tuple[int, int]] = []

    def see(layer: int, inputs: AttentionInputs) -> None:
        if layer in found:
            return
        grid[:] = [inputs.grid()]
        if length < 2 * max(grid[0]):
            raise NotToBeLookedAt(
                f"{length} tokens are fewer than two blocks of {max(grid[0])}, so nothing can be pruned; "
                f"give {2 * max(grid[0])} or more (--length {2 * max(grid[0])})"
            )
        found[layer] = [*_heads_of_layer(layer, inputs, cell)]

    with watch_attention(model, see):
        table = inspect_heads(
            model, chain([first], batches), log_pruning_tolerance=log_pruning_tolerance, dtype=dtype
        )
    heads = [head for layer in sorted(found) for head in found[layer]]
    table = table.assign(**_columns(heads))
    table["map_x"], table["map_y"] = place_heads(table, heads)
    return ModelHeads(table, heads, first[0].cpu(), cell, grid[0], model.config.log_pruning_tolerance)


def _heads_of_layer(layer: int, inputs: AttentionInputs, cell: int) -> Iterator[Head]:
    heads, kv_heads = inputs.q.shape[1], inputs.k.shape[1]
    c = cumulative_log_fgate(inputs.log_fgate[:1])[0]
    threshold = inputs.threshold.expand(inputs.q.shape[:2])[0]
    for head in range(heads):
        q, k = inputs.q[0, head], inputs.k[0, head // (heads // kv_heads)]
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)).contiguous() for x in (q, k))
        weights = head_weights(
            q, k, c[head], threshold[head], grid=inputs.grid(), cell=cell, strongest=STRONGEST
        )
        on_cpu = HeadWeights(*(getattr(weights, field.name).cpu() for field in fields(weights)))
        yield Head(layer, head, inputs.log_fgate[0, head].cpu(), on_cpu)


def _columns(heads: list[Head]) -> dict[str, list[float]]:
    every = [head.weights for head in heads]
    return {
        "half_weight_tokens": [int((w.by_distance.cumsum(0) < 0.5).sum()) for w in every],
        "strongest_weight": [float(w.weights[:, 0].double().mean()) for w in every],
        "first_token_weight": [float(w.received[0]) / len(w.received) for w in every],
        "largest_pruned_mass": [float(w.pruned_mass.max()) for w in every],
    }


def place_heads(table: pd.DataFrame, heads: list[Head]) -> tuple[np.ndarray, np.ndarray]:
    """A place in the plane for each head, near heads that are like it.

    Heads are alike if they forget alike, prune alike, peak alike, and spread their weight over similar
    distances. The places are the first two principal components of these numbers, each scaled to unit spread.

    Returns:
        x and y, (heads,) float64 each, within -1 and 1. The sign of an axis has no meaning by itself; heads
        with more weight far away are on the right.
    """
    octaves = [2**e - 1 for e in range(1, max(2, math.ceil(math.log2(len(heads[0].log_fgate)))))]
    near = np.array([head.weights.by_distance.cumsum(0)[octaves].tolist() for head in heads])
    others = np.stack(
        [
            table["token_pruned_ratio"],
            np.log10(np.clip(1 - table["mean_forget_gate"], 1e-6, None)),
            np.log10(table["median_window_tokens"]),
            table["strongest_weight"],
            table["first_token_weight"],
        ],
        1,
    )

    def scaled(x: np.ndarray) -> np.ndarray:
        """Every column with mean 0; all columns together with the spread of one."""
        x = x - x.mean(0)
        return x / max(np.sqrt((x**2).sum() / len(x)), 1e-12)

    spread = others.std(0)
    numbers = np.hstack([scaled(near), scaled(others / np.where(spread > 0, spread, 1))])
    numbers = np.pad(numbers - numbers.mean(0), ((0, max(0, 2 - len(numbers))), (0, 0)))
    left, strength, _ = np.linalg.svd(numbers, full_matrices=False)
    x, y = (left[: len(heads), :2] * strength[:2]).T
    far = -near.mean(1)
    x, y = (axis * (1 if axis @ (far - far.mean()) >= 0 else -1) for axis in (x, y))
    largest = max(np.abs(x).max(), np.abs(y).max(), 1e-12)
    return x / largest, y / largest


def _check_memory(config: FoXConfig, length: int, rows: int, device: torch.device) -> None:
    """Raises an error if ``look`` would fill the memory, by a count of what is held at once."""
    chunk = CHUNK_SCORES_CPU if device.type == "cpu" else CHUNK_SCORES_GPU
    # A block's activations: about ten as wide as the model, three as wide as the MLP, in float32.
    model = 4 * rows * length * (10 * config.hidden_size + 3 * config.mlp_width)
    of_head = length * (8 * STRONGEST + 28)
    chunks = 4 * 4 * max(chunk, length * ROWS_OF_BASE)
    held = config.num_hidden_layers * config.num_heads * of_head
    needs = {str(device): model + chunks, "cpu": held + (device.type == "cpu") * (model + chunks)}
    for name, need in needs.items():
        free = _free_bytes(torch.device(name))
        if free is not None and need > free:
            raise NotToBeLookedAt(
                f"{length:,} tokens need about {need / 1e9:.1f} GB of memory on {name}, and "
                f"{free / 1e9:.1f} GB are free; give fewer (a smaller --length)"
            )


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on ``device``; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
