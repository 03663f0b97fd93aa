"""The decay: running sums of log forget gates, and their adjoint (Section 2).

Every implementation reads the gates as their running sum ``c`` in float64. At 128k tokens with strong gates,
``c`` reaches -1e6, where float32 has a spacing of 0.06. The relevant differences ``D_ij = c_i - c_j`` are
small ones near the diagonal, which float32 would lose. Kernels first subtract a reference value of the tile
in float64 and then continue in float32.
"""

import math

import torch
from torch import Tensor

# exp(-1e4) is 0 in every floating-point format. This value therefore replaces the log of a gate of exactly 0
# (-inf, "forget all"), which keeps sums finite. No weight changes if scores differ by less than the floor.
LOG_FGATE_FLOOR = -1.0e4
# The largest allowed difference of scores if a gate is below the floor: the weight across that gate is then
# less than exp(-100), which is 0 in float32.
MOST_ACROSS_FLOOR = -LOG_FGATE_FLOOR - 100
# The largest allowed difference of scores in packed documents: with a decay below half the floor, a weight is
# then less than exp(-100), which is 0 in float32.
MOST_BETWEEN_DOCUMENTS = -LOG_FGATE_FLOOR / 2 - 100
SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16


def cumulative_log_fgate(log_fgate: Tensor) -> Tensor:
    """``c_i = sum_{l <= i} log f_l`` (B, H, T) float64, non-increasing along T.

    Args:
        log_fgate: (B, H, T) log forget gates, at most 0; ``-inf`` counts as :data:`LOG_FGATE_FLOOR`.
    """
    return log_fgate.double().clamp(min=LOG_FGATE_FLOOR).cumsum(-1)


def count_closed_gates(log_fgate: Tensor) -> Tensor:
    """(B, H, T) float64: number of gates of exactly 0 up to each position; D is finite at equal counts."""
    return (log_fgate == -math.inf).double().cumsum(-1)


def document_starts(cu_seqlens: Tensor, length: int) -> Tensor:
    """(T,) bool: the first token of each packed document; ``cu_seqlens`` (N + 1,) has the starts and T."""
    # One more entry than tokens, for T and for the start of an empty last document.
    starts = torch.zeros(length + 1, dtype=torch.bool, device=cu_seqlens.device)
    return starts.index_fill_(0, cu_seqlens.long(), True)[:-1]


def cut_documents(log_fgate: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``log_fgate`` (B, H, T) with gates of 0 at document starts, which hide all earlier documents."""
    return log_fgate.masked_fill(document_starts(cu_seqlens, log_fgate.shape[-1]), float("-inf"))


def documents_threshold(threshold: Tensor | None, log_fgate: Tensor) -> Tensor:
    """delta (B, H) that also skips the blocks of other documents, even for exact attention (None).

    A decay below half the floor crosses a document start, or is as strong. The weight is then 0 in float32,
    so skipping changes no result. Without skipping, N documents would cost N times their work.
    """
    if threshold is None:
        shape, device = log_fgate.shape[:2], log_fgate.device
        return torch.full(shape, LOG_FGATE_FLOOR / 2, dtype=torch.float32, device=device)
    return threshold.clamp(min=LOG_FGATE_FLOOR / 2)


def log_fgate_grad(dc: Tensor, log_fgate: Tensor) -> Tensor:
    """The adjoint of :func:`cumulative_log_fgate`: ``d log f_l = sum_{i >= l} dc_i``, 0 below the floor.

    Args:
        dc: (B, H, T) gradient with respect to ``c``.
        log_fgate: (B, H, T) log forget gates.

    Returns:
        (B, H, T) in the dtype of ``log_fgate``.
    """
    dc = dc.double()  # because thousands of residues nearly cancel
    grad = dc.sum(-1, keepdim=True) - dc.cumsum(-1) + dc
    return grad.to(log_fgate.dtype).masked_fill_(log_fgate < LOG_FGATE_FLOOR, 0.0)


def threshold_offset(
    seqlen: int, log_pruning_tolerance: float, device: torch.device | None = None
) -> float | Tensor:
    """``log L - log epsilon`` as a float, or in compiled code as a float64 scalar tensor.

    Raises:
        ValueError: ``seqlen`` is less than 1 or not an integer, or ``log_pruning_tolerance`` is not a
            negative finite number.
    """
    if seqlen < 1 or seqlen % 1:
        raise ValueError(f"seqlen must be at least 1 and an integer, the number of keys, got {seqlen}")
    if not -math.inf < log_pruning_tolerance < 0:
        raise ValueError(
            "log_pruning_tolerance is log(epsilon) and must be negative and finite "
            f"(the paper uses -10), got {log_pruning_tolerance}"
        )
    if torch.compiler.is_compiling():
        # The math module would specialise the graph to the length, and each length would be recompiled.
        length = torch.full((), seqlen, dtype=torch.float64, device=device)
        return length.log() - log_pruning_tolerance
    return math.log(seqlen) - float(log_pruning_tolerance)
