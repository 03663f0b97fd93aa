"""The pruning threshold delta and the bounds on the scores (Section 3, Appendices A and E).

With ``delta = -2 U - log L + log epsilon``, the pruned weights of every row sum to less than epsilon. The
proof requires ``U >= |s_ij|`` for the scores as computed, so both bounds below include rounding errors.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .decay import LOG_FGATE_FLOOR, MOST_ACROSS_FLOOR, SMALLEST_NORMAL, threshold_offset

DEFAULT_LOG_PRUNING_TOLERANCE = -10.0

# Unit roundoff of each dtype, for rounding to nearest.
_UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}


def _dot_margin(head_dim: int) -> float:
    """An upper bound on the ratio of a float32 sum of ``head_dim`` products to its exact value."""
    return 1.0 + (head_dim + 8) * 2.0**-23


class Tolerance(NamedTuple):
    """The inputs of delta: log epsilon, and U per head or None to compute U from the norms of q and k."""

    log_pruning_tolerance: float
    logit_bound: Any = None


def choose_pruning(adaptive_threshold, log_pruning_tolerance, logit_bound) -> Any:
    """``adaptive_threshold`` unchanged, or a :class:`Tolerance` if epsilon determines delta, as with
    ``"auto"``.

    Raises:
        ValueError: ``adaptive_threshold`` is combined with another argument, or ``logit_bound`` is passed
            without ``log_pruning_tolerance``.
    """
    if log_pruning_tolerance is None and logit_bound is None:
        if isinstance(adaptive_threshold, str) and adaptive_threshold == "auto":
            return Tolerance(DEFAULT_LOG_PRUNING_TOLERANCE)
        return adaptive_threshold
    if log_pruning_tolerance is None or adaptive_threshold is not None:
        raise ValueError(
            "adaptive_threshold and log_pruning_tolerance are mutually exclusive, and logit_bound needs "
            "log_pruning_tolerance: pass either adaptive_threshold, or log_pruning_tolerance with or without "
            "logit_bound"
        )
    return Tolerance(log_pruning_tolerance, logit_bound)


def resolve_threshold(pruning: Any, shape: tuple[int, ...], seqlen: int, device: torch.device | None) -> Any:
    """delta (B, H) float32 from the result of :func:`choose_pruning`, or None for exact attention.

    ``shape`` is (B, H). This function does not use q or k, so a :class:`Tolerance` must contain U. If
    ``device`` is None, a number is returned as a float.
    """
    if pruning is None:
        return None
    batch, heads = shape
    if not isinstance(pruning, Tolerance):
        return checks.per_head_tensor(pruning, batch, heads, device)
    bound = checks.per_head_tensor(pruning.logit_bound, batch, heads, device, "logit_bound")
    return pruning_threshold(bound, seqlen, pruning.log_pruning_tolerance)


def pruning_threshold(
    logit_bound: Tensor | float, seqlen: int, log_pruning_tolerance: float = DEFAULT_LOG_PRUNING_TOLERANCE
) -> Tensor:
    """``delta = -2 U - log L + log epsilon`` (Section 3; proof in Appendix A).

    Args:
        logit_bound: U, any shape, an upper bound on ``|q.k| * sm_scale``, finite and at least 0.
        seqlen: L, the number of keys, an integer.
        log_pruning_tolerance: log epsilon, negative.

    Returns:
        float32 tensor of the shape of ``logit_bound``.

    Raises:
        ValueError: if ``seqlen`` is less than 1 or not an integer, ``log_pruning_tolerance`` is not a
            negative finite number, or U is negative, infinite or NaN. On a GPU, U is checked only under
            ``torch.autograd.set_detect_anomaly(True)``.
    """
    # torch.as_tensor would move a tensor to the default device.
    bound = (
        logit_bound.float()
        if isinstance(logit_bound, Tensor)
        else torch.as_tensor(logit_bound, dtype=torch.float32)
    )
    checks.check_values(
        "logit_bound U", bound, 0, torch.finfo(bound.dtype).max, " (the largest possible |score|)"
    )
    return find_threshold(bound, seqlen, log_pruning_tolerance)


def find_threshold(bound: Tensor, seqlen: int, log_pruning_tolerance: float) -> Tensor:
    """:func:`pruning_threshold` for a float32 tensor that may contain infinity, which prunes nothing."""
    offset = threshold_offset(seqlen, log_pruning_tolerance, bound.device)
    delta = torch.rsub(bound, -offset, alpha=2)  # -2 bound - offset in one kernel; a product by 2 is exact
    # Three float32 roundings happen above. One step outwards for each keeps the proof's inequality.
    return delta * (1.0 + 2.0**-22)


def check_floor(call: checks.AttentionCall, lowest: float, find_bound: Callable | None = None) -> None:
    """Rejects scores too large for gates in ``[lowest, LOG_FGATE_FLOOR)``, which c clamps to the floor.

    Args:
        find_bound: computes U from q, k and the scale; by default :func:`logit_bound_from_norms`.

    Raises:
        ValueError: scores may differ by more than :data:`.decay.MOST_ACROSS_FLOOR`. Values are read only if
            :func:`.checks.reads_values` permits it.
    """
    gates = call.log_fgate
    if checks.reads_values(gates) and bool(((gates < LOG_FGATE_FLOOR) & (gates >= lowest)).any()):
        checks.check_values(
            f"2 max||q|| max||k|| sm_scale with log gates below {LOG_FGATE_FLOOR:g}",
            2 * (find_bound or logit_bound_from_norms)(call.q, call.k, call.sm_scale),
            0,
            MOST_ACROSS_FLOOR,
            " (implementation='reference' has no such limit)",
        )


def logit_bound_from_qk_norm(
    q_weight: Tensor,
    k_weight: Tensor,
    num_heads: int,
    head_dim: int,
    sm_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num_kv_heads: int | None = None,
) -> Tensor:
    """U from the weights of the two RMSNorms of QK-norm (Appendix E): ``gamma_q gamma_k d sm_scale``.

    In exact arithmetic, RMSNorm implies ``||q|| <= max|gamma_q| sqrt(d)``. A factor accounts for rounding:
    three roundings to ``dtype`` (normalised value, weight, product), and the float32 sums of the norm and the
    dot product.

    Args:
        q_weight, k_weight: (head_dim,) shared by the heads, or (heads * head_dim,).
        sm_scale: score scale, default ``1 / sqrt(head_dim)``.
        dtype: dtype of the operands of the product of q and k.
        num_kv_heads: number of key heads under grouped-query attention; default num_heads.

    Returns:
        (num_heads,) float32 on the weights' device, computed without host synchronisation.

    Raises:
        ValueError: if a weight has a different shape, or num_kv_heads does not divide num_heads.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
    sm_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    gammas = []
    for name, weight, heads in (("q_weight", q_weight, num_heads), ("k_weight", k_weight, num_kv_heads)):
        if weight.shape not in ((head_dim,), (heads * head_dim,)):
            raise ValueError(
                f"{name} must have shape ({head_dim},) or ({heads * head_dim},), got {tuple(weight.shape)}"
            )
        gamma = torch.linalg.vector_norm(weight.detach().float().view(-1, head_dim), math.inf, dim=-1)
        shared = len(gamma) > 1 and heads < num_heads
        gammas.append(gamma.repeat_interleave(num_heads // heads) if shared else gamma)
    bound = (gammas[0] * gammas[1]).clamp(min=SMALLEST_NORMAL) * qk_norm_factor(head_dim, sm_scale, dtype)
    return bound.expand(num_heads)


def qk_norm_factor(head_dim: int, sm_scale: float, dtype: torch.dtype) -> float:
    """U of :func:`logit_bound_from_qk_norm` divided by the product of the two largest weights."""
    rounding = (1.0 + _UNIT_ROUNDOFF[dtype]) ** 6 * _dot_margin(head_dim) ** 2
    return head_dim * abs(sm_scale) * rounding


def logit_bound_from_norms(q: Tensor, k: Tensor, sm_scale: float | None = None) -> Tensor:
    """U from the norms of q and k (Section 3): ``max_i ||q_i|| max_j ||k_j|| sm_scale``.

    Norms are accumulated in float32 (float64 for float64 inputs), in which products of bfloat16 and float16
    values are exact, and then scaled up by the largest rounding error of such a sum.

    Args:
        q: (B, H, Tq, D). k: (B, Hkv, Tk, D), H a multiple of Hkv. Any floating-point dtype.
        sm_scale: score scale, default ``1 / sqrt(head_dim)``.

    Returns:
        (B, H) float32.
    """
    longest = torch.stack([longest_norms(x, q.shape[1]) for x in (q, k)])
    return join_norms(longest, q.shape[-1], sm_scale)


def longest_norms(x: Tensor, heads: int) -> Tensor:
    """(B, heads) float32: the largest norm of the rows of x (B, H or Hkv, T, D), rounded to nearest."""
    # Dividing each head by the power of two of its largest entry prevents underflow and overflow of the
    # squares. Scaling by a power of two leaves all other norms bitwise identical.
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs().amax((-2, -1)).clamp(torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).max)
    scale = largest / (2 * largest.frexp().mantissa)
    norm = (torch.linalg.vector_norm(x / scale[..., None, None], dim=-1).amax(-1) * scale).float()
    # Underflow would lower the bound, here and in join_norms.
    return norm.clamp(min=SMALLEST_NORMAL).repeat_interleave(heads // x.shape[1], 1)


def join_norms(longest: Tensor, head_dim: int, sm_scale: float | None) -> Tensor:
    """U (B, H) from the largest norms of q and k (2, B, H), including rounding errors of norms and scores."""
    return (longest[0] * longest[1]).clamp(min=SMALLEST_NORMAL) * norms_factor(head_dim, sm_scale)


def norms_factor(head_dim: int, sm_scale: float | None) -> float:
    sm_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    return max(SMALLEST_NORMAL, abs(float(sm_scale)) * _dot_margin(head_dim) ** 3)
