"""Forgetting attention for FlexAttention: a score modification, and the boundary as a block mask."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .boundary import find_boundary
from .checks import check_gates, check_window
from .decay import cumulative_log_fgate
from .threshold import choose_pruning, resolve_threshold

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def as_flex(
    log_fgate: Tensor,
    *,
    adaptive_threshold: None | float | Tensor = None,
    log_pruning_tolerance: float | None = None,
    logit_bound: None | float | Tensor = None,
    window_size: int | None = None,
    head_first: bool = False,
    block_size: int | tuple[int, int] = 128,
) -> tuple[Callable, BlockMask]:
    """The arguments of ``flex_attention`` that compute :func:`.forgetting_attention` with ACP.

        score_mod, block_mask = as_flex(log_fgate, log_pruning_tolerance=-10.0, logit_bound=bound)
        out = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)  # q, k, v heads first

    Compiled ``flex_attention`` skips the pruned blocks; without ``torch.compile`` it masks their entries.
    With the block sizes of :func:`.pruning_grid`, the result equals that of :func:`.forgetting_attention`.

    Args:
        log_fgate: (batch, length, heads) float32, at most 0, or (batch, heads, length) with ``head_first``.
            The numbers of queries and keys are equal, with one gate per query head.
        adaptive_threshold, log_pruning_tolerance, logit_bound, window_size: as in
            :func:`.forgetting_attention`, but ``log_pruning_tolerance`` requires ``logit_bound``, because q
            and k are unknown here.
        block_size: the pruning grid in tokens: one size for queries and keys, or (queries, keys).

    Returns:
        ``score_mod``, which adds the decay ``D_ij``, and the ``BlockMask`` of all blocks from the boundary to
        the diagonal. Blocks without masked entries are full blocks.

    Raises:
        TypeError, ValueError: as :func:`.forgetting_attention`.
    """
    gates = log_fgate if head_first else log_fgate.transpose(1, 2)
    check_gates(gates)
    window_size = check_window(window_size)
    length = gates.shape[2]
    pruning = choose_pruning(adaptive_threshold, log_pruning_tolerance, logit_bound)
    threshold = resolve_threshold(pruning, gates.shape[:2], length, gates.device)
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    c = cumulative_log_fgate(gates)
    boundary = find_boundary(c.detach(), threshold, length, block_q, block_k, window_size=window_size)

    def add_decay(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (c[b, h, i] - c[b, h, j]).to(score.dtype)

    def is_kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = (j <= i) & (j >= boundary[b, h, i // block_q] * block_k)
        return kept if window_size is None else kept & (j > i - window_size)

    row = torch.arange(0, length, block_q, device=gates.device)
    # Blocks from `first` to `last` have no masked entry: they are after the window's edge and below the
    # diagonal.
    edge = torch.zeros_like(row)
    if window_size is not None:
        edge = ((row + block_q - window_size).clamp(min=0) + block_k - 1) // block_k
    # A short last query block has no full block: the mask must set the weights of queries past the end to 0.
    first, last = torch.maximum(boundary, edge), (row + 1) // block_k * (row + block_q <= length)
    end = ((row + block_q).clamp(max=length) - 1) // block_k + 1
    blocks = torch.arange(-(-length // block_k), device=gates.device)
    from_boundary = (blocks >= boundary[..., None]) & (blocks < end[:, None])
    full = (blocks >= first[..., None]) & (blocks < last[:, None])
    flex = importlib.import_module("torch.nn.attention.flex_attention")  # imports the compiler
    return add_decay, flex.BlockMask.from_kv_blocks(
        *_list_blocks(from_boundary & ~full),
        *_list_blocks(full),
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=is_kept,
        seq_lengths=(length, length),
    )


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen blocks per row (B, H, M), and block indices (B, H, M, N), chosen ones first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int()
