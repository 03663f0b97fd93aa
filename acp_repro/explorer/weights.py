"""Statistics of the attention weights of one head, computed in chunks of rows without a T x T matrix.

The statistics are sums by block, by distance and by key, and the strongest keys of every query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from acp_repro.attention.boundary import find_boundary

# Scores per chunk. A CPU is fastest within its caches, a GPU with many rows per launch.
CHUNK_SCORES_CPU, CHUNK_SCORES_GPU = 2**21, 2**26
SPAN = 128  # chunks are multiples of this number of rows, so that they contain whole blocks of queries
# Rows that share one reference value for their decays; see `_scores`.
ROWS_OF_BASE = 64


class RowSums:
    """Accumulates additional sums in the pass of :func:`head_weights`; the base class accumulates none."""

    def add_scores(self, first: int, block: Tensor) -> None:
        """Processes ``block`` (R, W), the base-2 logits of the queries from ``first`` on; -inf if masked."""

    def add_weights(self, first: int, weights: Tensor) -> None:
        """Processes ``weights`` (R, W), the weights of the same queries; the tensor is reused afterwards."""


@dataclass
class HeadWeights:
    """Statistics of the exact weight matrix A (Equation 2) of a head, T queries by T keys.

    Attributes:
        first_kept: (T,) int32, the first key j of each query with ``D_ij >= delta``: blocks of one token.
        boundary: (M,) int32, n_m: the first kept key block of each query block.
        keys: (T, K) int32, the K strongest keys of each query, the strongest first; padded with -1.
        weights: (T, K), their weights A, padded with 0.
        pruned_mass: (T,), the weight of the pruned blocks, which Appendix A bounds by epsilon. With pruning
            (Equation 3), the weight of a kept key is A / (1 - pruned_mass).
        cells: (N, N), the mean weight of the queries of a square of ``cell`` tokens on its keys; each row
            sums to 1, or with a sink to 1 minus the sink's weight.
        by_distance: (T,) float64, the mean weight at each distance i - j, which sums to the mean row sum.
        received: (T,) float64, the total weight of all queries on each key.
    """

    first_kept: Tensor
    boundary: Tensor
    keys: Tensor
    weights: Tensor
    pruned_mass: Tensor
    cells: Tensor
    by_distance: Tensor
    received: Tensor

    def cpu(self) -> HeadWeights:
        """A copy on the CPU."""
        return HeadWeights(*(getattr(self, field.name).cpu() for field in fields(self)))


def cell_tokens(length: int, cells: int = 256) -> int:
    """The side of a square: the smallest power of two that splits ``length`` into at most ``cells`` parts."""
    return 1 << max(0, (-(-length // cells) - 1).bit_length())


def head_weights(
    q: Tensor,
    k: Tensor,
    c: Tensor | None,
    threshold: Tensor | None,
    *,
    grid: tuple[int, int],
    cell: int,
    strongest: int = 8,
    chunk_scores: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    window_size: int | None = None,
    sink: Tensor | None = None,
    sums: RowSums | None = None,
) -> HeadWeights:
    """All statistics of one head's A, computed in one pass.

    Args:
        q, k: (T, D); sums are float32, or float64 for float64 inputs.
        c: (T,) float64, the running sum of the log forget gates; None without decay.
        threshold: delta, one number; None prunes nothing.
        grid: the sizes of query blocks and key blocks in tokens.
        cell: the side of a square of ``cells`` in tokens, from :func:`cell_tokens`.
        strongest: K.
        chunk_scores: scores in memory at once; a chunk has at least :data:`SPAN` rows.
        scaling, softcap, window_size: as in :class:`LayerInputs`; default ``1 / sqrt(D)``, no cap, no window.
        sink: the head's entry of :attr:`LayerInputs.sinks`, one number; None for no sink.
        sums: additional sums to accumulate in the same pass.
    """
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)).contiguous() for x in (q, k))
    length, device = len(q), q.device
    sums = sums or RowSums()
    sink = q.new_tensor(-math.inf) if sink is None else sink.to(q.dtype) / math.log(2)
    if chunk_scores is None:
        chunk_scores = CHUNK_SCORES_CPU if device.type == "cpu" else CHUNK_SCORES_GPU
    rows = SPAN * max(1, chunk_scores // (SPAN * length))
    decay = q.new_zeros(length, dtype=torch.float64) if c is None else c
    delta = None if threshold is None else threshold.view(1, 1)
    boundary, first_kept = (
        find_boundary(decay[None, None], delta, length, *blocks, window_size=window_size)[0, 0]
        for blocks in (grid, (1, 1))
    )
    columns = torch.arange(length, device=device)
    pruned_before = (boundary.long() * grid[1]).repeat_interleave(grid[0])[:length, None]
    keys = torch.full((length, strongest), -1, dtype=torch.int32, device=device)
    weights = q.new_zeros(length, strongest)
    pruned_mass = q.new_zeros(length)
    squares = torch.nn.functional.one_hot(columns // cell).to(q.dtype)  # (T, N): the square of each token
    cells = q.new_zeros(squares.shape[1], squares.shape[1])
    by_distance, received = (torch.zeros(length, dtype=torch.float64, device=device) for _ in range(2))
    scores = q.new_empty(min(rows, length), length)
    future = torch.ones(len(scores), len(scores), dtype=torch.bool, device=device).triu_(1)
    # Base 2, because exp on a CPU is many times slower if the result is almost 0, as for most scores here.
    scaling = float(q.shape[1] ** -0.5) if scaling is None else scaling
    q, decay = q * (scaling / (softcap or math.log(2))), decay / math.log(2)
    for first in range(0, length, rows):
        last = min(length, first + rows)
        here, block = slice(first, last), scores.flatten()[: (last - first) * last].view(-1, last)
        if softcap is None:
            _scores(q, k, decay, first, block)
        else:
            torch.mm(q[here], k[:last].T, out=block).tanh_().mul_(softcap / math.log(2))
        block[:, first:].masked_fill_(future[: last - first, : last - first], float("-inf"))
        if window_size is not None and last > window_size:
            block.masked_fill_(columns[here, None] - columns[:last] >= window_size, float("-inf"))
        sums.add_scores(first, block)
        # The decay makes scores rise along a row; topk is several times faster on falling scores.
        values, index = block.flip(1).topk(min(strongest, last))
        peak = values[:, :1].maximum(sink)
        block.sub_(peak).exp2_()
        total = block.sum(1, keepdim=True) + (sink - peak).exp2()
        block.div_(total)
        sums.add_weights(first, block)
        found = values > float("-inf")
        keys[here, : index.shape[1]] = (last - 1 - index).int().masked_fill(~found, -1)
        weights[here, : index.shape[1]] = (values - peak).exp2_() / total
        pruned_mass[here] = block.where(columns[:last] < pruned_before[here], 0).sum(1)
        received[:last] += block.sum(0)
        by_distance[:last] += sum_by_distance(block)
        by_square = torch.nn.functional.pad(block, (0, -last % cell)).unflatten(1, (-1, cell)).sum(2)
        cells[:, : by_square.shape[1]] += squares[here].T @ by_square
    cells /= squares.sum(0)[:, None]
    return HeadWeights(
        first_kept, boundary, keys, weights, pruned_mass, cells, by_distance / length, received
    )


def _scores(q: Tensor, k: Tensor, c: Tensor, first: int, out: Tensor) -> None:
    """Writes the base-2 logits of the rows from ``first`` on, up to a constant per row, to ``out``.

    The softmax is invariant to the constant. The decay is computed as ``c_base - c_j`` in float64 with a base
    near the row. With a distant base, float32 would lose the small differences near the diagonal.
    """
    last = out.shape[1]
    keys = k[:last].T
    for row in range(0, len(out), ROWS_OF_BASE):
        decay = (c[first + row] - c[:last]).to(q.dtype)
        own = out[row : row + ROWS_OF_BASE]
        torch.addmm(decay[None], q[first + row : first + row + len(own)], keys, out=own)


def sum_by_distance(weights: Tensor) -> Tensor:
    """(W,): the sum of ``weights`` (R, W), the rows of the last R of W queries, at each distance."""
    rows = len(weights)
    # Each row, reversed, is shifted by one more element, so that a column has one distance.
    slanted = torch.nn.functional.pad(weights.flip(1), (0, rows)).flatten()[:-rows].view(rows, -1)
    return slanted.sum(0)[rows - 1 :]
