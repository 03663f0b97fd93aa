"""The pruning boundary of each query block (Section 3, Algorithm 1), and the FLOPs and bytes that it saves.

All implementations share these conventions. Query i is at absolute position ``i + Tk - Tq``. Query block m
contains queries ``m * block_q ...``, key block l contains keys ``l * block_k ...``. Block (m, l) is pruned if
its largest decay, ``c[first position of m] - c[last position of l]``, is less than delta. NaN prunes nothing.

``boundary`` is n_m, the first kept key block of query block m. n_m is at most the block of the first query's
own position, whose decay is 0. With a window, the blocks entirely before the window of the first query are
skipped too, and n_m is the maximum of both. Blocks that the window's edge crosses are masked per entry.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def _first_positions(
    seqlen_q: int, seqlen_k: int, block_q: int, device: str | torch.device = "cpu"
) -> Tensor:
    """(M,) int64, the absolute position of the first query of each query block."""
    return torch.arange(0, seqlen_q, block_q, device=device) + (seqlen_k - seqlen_q)


def _last_positions(seqlen_k: int, block_k: int, device: str | torch.device = "cpu") -> Tensor:
    """(N,) int64, the last key position of each key block; the last block may be short."""
    starts = torch.arange(0, seqlen_k, block_k, device=device)
    return (starts + (block_k - 1)).clamp_(max=seqlen_k - 1)


def window_start(position, window_size):
    """The first key that the query at ``position`` sees; negative if its window starts before token 0."""
    # The kernels compile this function, which accepts numbers and tensors.
    return position - (window_size - 1)


def window_end(position, window_size):
    """The inverse of :func:`window_start`: the last query that sees the key at ``position``."""
    return position + (window_size - 1)


def find_boundary_serial(c: Tensor, threshold: Tensor, seqlen_q: int, block_q: int, block_k: int) -> Tensor:
    """Algorithm 1 of the paper, with one correction: n_m is the block that passed the test, not the next one.

    The blocks are scanned serially. This function is the oracle of :func:`find_boundary` and has the same
    arguments and result.
    """
    batch, heads, seqlen_k = c.shape
    first = _first_positions(seqlen_q, seqlen_k, block_q).tolist()
    last = _last_positions(seqlen_k, block_k).tolist()
    boundary = torch.empty(batch, heads, len(first), dtype=torch.int32, device="cpu")
    for b in range(batch):
        for h in range(heads):
            decay, delta, column = c[b, h].tolist(), float(threshold[b, h]), 0
            for m, position in enumerate(first):
                diagonal = position // block_k
                while column < diagonal and decay[position] - decay[last[column]] < delta:
                    column += 1
                boundary[b, h, m] = column
    return boundary.to(c.device)


def find_boundary(
    c: Tensor,
    threshold: Tensor | None,
    seqlen_q: int,
    block_q: int,
    block_k: int,
    seq_start: Tensor | None = None,
    window_size: int | None = None,
) -> Tensor:
    """The boundary of every query block, by one binary search per row of blocks.

    c is non-increasing and floating-point subtraction is monotone, so the pruned blocks of a row are a
    prefix. Each step halves the ranges of all rows at once.

    Args:
        c: (B, H, Tk) float64.
        threshold: (B, H) delta, or None to prune nothing.
        seq_start: (B,) int64. Key blocks entirely before it contain only padding and are skipped too.
        window_size: keys that a query sees, its own included, or None for no window.

    Returns:
        (B, H, M) int32, equal to :func:`find_boundary_serial` without ``seq_start`` and ``window_size``.
    """
    batch, heads, seqlen_k = c.shape
    first = _first_positions(seqlen_q, seqlen_k, block_q, c.device)
    diagonal = (first // block_k).expand(batch, heads, -1)
    if threshold is None:
        low = torch.zeros_like(diagonal)
    else:
        row = c[..., first]
        column = c[..., _last_positions(seqlen_k, block_k, c.device)]
        delta = threshold.to(c.dtype)[..., None]
        low, high = torch.zeros_like(diagonal), diagonal.clone()
        for _ in range(((seqlen_k - 1) // block_k).bit_length()):
            middle = (low + high) >> 1
            pruned = row - column.gather(-1, middle) < delta
            open_ = low < high
            low = torch.where(pruned & open_, middle + 1, low)
            high = torch.where(~pruned & open_, middle, high)
    if seq_start is not None:
        low = torch.maximum(low, (seq_start // block_k)[:, None, None])
    if window_size is not None:
        low = torch.maximum(low, window_start(first, window_size).clamp(min=0) // block_k)
    return torch.minimum(low, diagonal).to(torch.int32)


class BlockCount(NamedTuple):
    """Numbers of pruned and causal blocks of each (batch, head)."""

    pruned: Tensor  # (B, H) int64
    causal: int  # blocks of one head's grid

    @property
    def pruned_ratio(self) -> Tensor:
        """(B, H) float64, the saving in FLOPs and memory accesses of Figure 2."""
        return self.pruned.double() / self.causal


def causal_blocks(seqlen_q: int, seqlen_k: int, block_q: int, block_k: int) -> int:
    """The number of blocks (m, l) with at least one entry on or below the diagonal."""
    first = _first_positions(seqlen_q, seqlen_k, block_q)
    last_of_row = (first + (block_q - 1)).clamp_(max=seqlen_k - 1)
    return int((last_of_row // block_k + 1).sum())


def count_blocks(boundary: Tensor, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int) -> BlockCount:
    """The numbers of pruned blocks, ``sum_m n_m``, and of causal blocks, ``sum_m (last block of row m + 1)``.

    All skipped blocks count as pruned, including those before a window, and all blocks on or below the
    diagonal count as causal, whatever the window. For the pruning by gates alone, subtract the count of the
    boundary (B, H, M) with the same window and no threshold.
    """
    causal = causal_blocks(seqlen_q, seqlen_k, block_q, block_k)
    return BlockCount(boundary.sum(-1, dtype=torch.int64), causal)


def token_level_pruned_ratio(c: Tensor, threshold: Tensor) -> Tensor:
    """The fraction (B, H) of entries (i, j <= i) with ``D_ij < delta``: the pruned ratio at block size 1."""
    boundary = find_boundary(c, threshold, c.shape[-1], 1, 1)
    return count_blocks(boundary, c.shape[-1], c.shape[-1], 1, 1).pruned_ratio


def attention_flops(blocks: int | Tensor, block_q: int, block_k: int, head_dim: int, backward: bool):
    """FLOPs of the matrix products in ``blocks``, a number or a tensor; one multiply-add is 2 FLOPs.

    The forward pass has two products (QK^T, PV). The backward pass has five (QK^T recomputed, dO V^T, P^T dO,
    dS K, dS^T Q), by the convention of FlashAttention.
    """
    return blocks * (2 * block_q * block_k * head_dim) * (5 if backward else 2)


def attention_bytes(blocks: int | Tensor, block_k: int, head_dim: int, itemsize: int):
    """Bytes of K and V that the forward pass reads for ``blocks``, a number or a tensor."""
    return blocks * (2 * block_k * head_dim * itemsize)
