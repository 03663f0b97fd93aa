"""The decay: running sums of log forget gates, and their adjoint (Section 2).

Every implementation reads the gates in one form, ``c``. It is float64. At 128k tokens with strong gates,
``c`` reaches -1e6, where float32 has a spacing of 0.06. The differences ``D_ij = c_i - c_j`` that matter are
small ones, near the diagonal, and would be lost. Kernels subtract in float64 relative to a base of the tile
and only then continue in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exp(-1e4) is 0 in every floating-point format. So this value can replace the log of a gate of exactly 0
# (-inf, "forget all") and sums stay finite. No weight changes while scores differ by less than the floor.
LOG_FGATE_FLOOR = -1.0e4
# The most by which scores may differ if a gate is below the floor: the weight behind that gate is then under
# exp(-100), which is 0 in float32.
MOST_ACROSS_FLOOR = -LOG_FGATE_FLOOR - 100
# The most by which scores of packed documents may differ: a decay beyond half the floor then leaves a weight
# under exp(-100), which is 0 in float32.
MOST_BETWEEN_DOCUMENTS = -LOG_FGATE_FLOOR / 2 - 100
SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16


def cumulative_log_fgate(log_fgate: Tensor) -> Tensor:
    """``c_i = sum_{l <= i} log f_l`` (B, H, T) float64, non-increasing along T.

    Args:
        log_fgate: (B, H, T) log forget gates, at most 0; ``-inf`` counts as :data:`LOG_FGATE_FLOOR`.
    """
    return log_fgate.double().clamp(min=LOG_FGATE_FLOOR).cumsum(-1)


def count_closed_gates(log_fgate: Tensor) -> Tensor:
    """The number of gates of exactly 0 up to each position, (B, H, T) float64; equal where D is finite."""
    return (log_fgate == -math.inf).double().cumsum(-1)


def document_starts(cu_seqlens: Tensor, length: int) -> Tensor:
    """(T,) bool: the first token of each packed document; ``cu_seqlens`` (N + 1,) are the starts, and T."""
    # One place more than there are tokens, for T and for the start of an empty last document.
    starts = torch.zeros(length + 1, dtype=torch.bool, device=cu_seqlens.device)
    return starts.index_fill_(0, cu_seqlens.long(), True)[:-1]


def cut_documents(log_fgate: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``log_fgate`` (B, H, T) with gates of 0 where documents start, so that none sees an earlier one."""
    return log_fgate.masked_fill(document_starts(cu_seqlens, log_fgate.shape[-1]), float("-inf"))


def documents_threshold(threshold: Tensor | None, log_fgate: Tensor) -> Tensor:
    """delta (B, H) under which blocks of other documents are skipped, even for exact attention (None).

    A decay beyond half the floor comes from a cut, or is as strong as one. Its weight is 0 in float32, so
    skipping it changes nothing. Without skipping, N documents would cost N times their work.
    """
    if threshold is None:
        shape, device = log_fgate.shape[:2], log_fgate.device
        return torch.full(shape, LOG_FGATE_FLOOR / 2, dtype=torch.float32, device=device)
    return threshold.clamp(min=LOG_FGATE_FLOOR / 2)


def log_fgate_grad(dc: Tensor, log_fgate: Tensor) -> Tensor:
    """The adjoint of :func:`cumulative_log_fgate`: ``d log f_l = sum_{i >= l} dc_i``, 0 under the floor.

    Args:
        dc: (B, H, T) gradient with respect to ``c``.
        log_fgate: (B, H, T), the gates.

    Returns:
        (B, H, T) in the dtype of ``log_fgate``.
    """
    dc = dc.double()  # thousands of residues nearly cancel
    grad = dc.sum(-1, keepdim=True) - dc.cumsum(-1) + dc
    return grad.to(log_fgate.dtype).masked_fill_(log_fgate < LOG_FGATE_FLOOR, 0.0)


def threshold_offset(
    seqlen: int, log_pruning_tolerance: float, device: torch.device | None = None
) -> float | Tensor:
    """``log L - log epsilon``: a float, or in compiled code a float64 scalar tensor.

    Raises:
        ValueError: ``seqlen`` is under 1 or no integer, or ``log_pruning_tolerance`` is not a negative finite
            number.
    """
    if seqlen < 1 or seqlen % 1:
        raise ValueError(f"seqlen must be at least 1 and an integer, the number of keys, got {seqlen}")
    if not -math.inf < log_pruning_tolerance < 0:
        raise ValueError(
            "log_pruning_tolerance is log(epsilon) and must be negative and finite "
            f"(the paper uses -10), got {log_pruning_tolerance}"
        )
    if torch.compiler.is_compiling():
        # The math module would read the length itself, and then each length would need its own graph.
        length = torch.full((), seqlen, dtype=torch.float64, device=device)
        return length.log() - log_pruning_tolerance
    return math.log(seqlen) - float(log_pruning_tolerance)
