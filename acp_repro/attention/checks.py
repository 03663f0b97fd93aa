"""The arguments of a call and their validation. Each error names the argument and the accepted values."""

import functools
import math
import numbers
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor


class AttentionCall(NamedTuple):
    """The validated arguments of operators and implementations, heads first.

    q is (B, H, Tq, D), k and v are (B, Hkv, Tk, D) with H a multiple of Hkv, log_fgate is (B, H, Tk) float32,
    threshold is (B, H) float32, a number (for `triton`) or None, and seq_start is (B,) int64 or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_fgate: Tensor
    threshold: Any
    seq_start: Tensor | None
    sm_scale: float
    implementation: str
    window_size: int | None = None


def check_arguments(q, k, v, log_fgate, *, head_first, seq_start, dtypes) -> None:
    """Checks shapes, devices and dtypes, without reading values; ``dtypes`` are those of the backend."""
    layout = "(batch, heads, time, head_dim)" if head_first else "(batch, time, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v), ("log_fgate", log_fgate)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if name != "log_fgate" and x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {layout}, got shape {tuple(x.shape)}")
    if q.dtype not in dtypes:
        hint = "(float64 requires implementation='reference')"
        raise TypeError(f"q must be bfloat16, float16 or float32, got {q.dtype} {hint}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    if log_fgate.dtype not in {torch.float32, torch.float64}.intersection(dtypes):
        raise TypeError(f"log_fgate must be float32 (logsigmoid(logits.float())), got {log_fgate.dtype}")
    for name, x in (("k", k), ("v", v), ("log_fgate", log_fgate)):
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")

    time, heads = (2, 1) if head_first else (1, 2)
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    for axis, what in ((0, "batch size"), (3, "head_dim")):
        if k.shape[axis] != q.shape[axis]:
            raise ValueError(
                f"k must have the {what} of q, {q.shape[axis]}, got {k.shape[axis]} in "
                f"{tuple(k.shape)}; the layout is {layout} (head_first={head_first})"
            )
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
        raise ValueError(
            f"q must have a multiple of k's number of heads, {k.shape[heads]}, got {q.shape[heads]}; "
            f"the layout is {layout} (head_first={head_first})"
        )
    if q.shape[time] > k.shape[time]:
        raise ValueError(
            f"seqlen_q must be at most seqlen_k (queries are the last positions), got q with "
            f"{q.shape[time]} and k with {k.shape[time]} time steps"
        )
    if not 16 <= q.shape[3] <= 256:
        raise ValueError(f"head_dim must be from 16 to 256, got {q.shape[3]}")
    expected = list(q.shape[:3])
    expected[time] = k.shape[time]
    if list(log_fgate.shape) != expected:
        raise ValueError(
            f"log_fgate must have shape {tuple(expected)}, one gate per key and query head "
            f"(head_first={head_first}), got {tuple(log_fgate.shape)}"
        )
    check_seq_start(seq_start, q)
    # Comparing two sizes would add a guard to compiled code.
    if not (head_first or torch.compiler.is_compiling()) and q.shape[2] > k.shape[1]:
        _warn_of_layout()


@functools.cache
def _warn_of_layout() -> None:
    """Warns once per process; short sequences with many heads are valid."""
    warnings.warn(
        "the inputs have more heads than time steps; if their layout is (batch, heads, time, head_dim), pass "
        "head_first=True",
        stacklevel=5,
    )


def check_scale(sm_scale, head_dim: int) -> float:
    """``sm_scale``, any real number, as a float; by default ``1 / sqrt(head_dim)``."""
    if sm_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not (isinstance(sm_scale, numbers.Real) and math.isfinite(sm_scale) and float(sm_scale) > 0):
        raise ValueError(f"sm_scale must be a positive finite number or None, got {sm_scale!r}")
    return float(sm_scale)


def check_seq_start(seq_start: Tensor | None, q: Tensor) -> None:
    """Checks the shape, dtype and device of ``seq_start``, the first real token of each row of ``q``."""
    if seq_start is None:
        return
    if not isinstance(seq_start, Tensor) or seq_start.dtype not in (torch.int32, torch.int64):
        raise TypeError("seq_start must be an int64 tensor of shape (batch,)")
    if seq_start.shape != q.shape[:1] or seq_start.device != q.device:
        raise ValueError(
            f"seq_start must have shape ({q.shape[0]},) on the device of q, {q.device}, got "
            f"{tuple(seq_start.shape)} on {seq_start.device}"
        )


def check_window(window_size) -> int | None:
    """``window_size``, a number of keys or None, as an int or None."""
    if window_size is None:
        return None
    if isinstance(window_size, bool) or not isinstance(window_size, numbers.Integral):
        raise TypeError(
            "window_size must be None or an integer number of keys, including the query's own "
            f"(FlashAttention's (left, 0) is left + 1), got {window_size!r}"
        )
    if window_size < 1:
        raise ValueError(
            f"window_size must be at least 1, the query's own key, or None for no window, got {window_size}"
        )
    return int(window_size)


def check_packing(cu_seqlens, q: Tensor, k: Tensor, seq_start, length: int) -> None:
    """Checks the starts of documents packed into ``length`` tokens against q (B, H, Tq, D) and k."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError("cu_seqlens must be an int32 or int64 tensor of shape (documents + 1,)")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens must have shape (documents + 1,) on the device of q, {q.device}, got "
            f"{tuple(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    if len(q) != 1 or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"cu_seqlens needs a batch of one and as many queries as keys, got a batch of {len(q)} with "
            f"{q.shape[2]} queries and {k.shape[2]} keys"
        )
    if seq_start is not None:
        raise ValueError("cu_seqlens and seq_start cannot be used together: packed text has no padding")
    if reads_values(cu_seqlens) and (
        cu_seqlens[0] != 0 or cu_seqlens[-1] != length or bool((cu_seqlens.diff() < 0).any())
    ):
        raise ValueError(f"cu_seqlens must start with 0, end with the length {length} and be non-decreasing")


# For each argument of :func:`per_head_tensor`: the accepted values besides tensors, and the range of a
# number.
_PER_HEAD = {
    "adaptive_threshold": ("None, a number <= 0, 'auto',", -math.inf, 0.0),
    "logit_bound": ("a finite number >= 0", 0.0, torch.finfo(torch.float32).max),
}


def per_head_tensor(x, batch: int, heads: int, device, name: str = "adaptive_threshold") -> Any:
    """The argument ``name``, a number or a tensor, as a (batch, heads) float32 tensor on ``device``.

    If ``device`` is None, a number is returned as a float.
    """
    allowed, low, high = _PER_HEAD[name]
    rule = f"{name} must be {allowed} or a tensor broadcastable to ({batch}, {heads})"
    if isinstance(x, Tensor):
        if not x.is_floating_point():
            raise TypeError(f"{rule}; got dtype {x.dtype}")
        try:
            expanded = x.detach().to(device, torch.float32).expand(batch, heads)
        except RuntimeError:
            raise ValueError(f"{rule}; got shape {tuple(x.shape)}") from None
        return expanded.contiguous().resolve_neg()
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{rule}; got {x!r}")
    if not low <= float(x) <= high:
        raise ValueError(f"{rule}; got {x}")
    if device is None:
        return float(x)
    # The default dtype might round the number up, which would prune more than requested.
    return torch.full((batch, heads), float(x), dtype=torch.float32, device=device)


def reads_values(x: Tensor) -> bool:
    """Whether to check the values of ``x``: on a GPU only in anomaly mode, because reading synchronises."""
    # In compiled code only the operators check values, and a fake tensor has none.
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return False
    return x.device.type == "cpu" or torch.is_anomaly_enabled()


def check_values(name: str, x: Tensor | None, low: float, high: float, hint: str = "") -> None:
    """Raises ValueError if :func:`reads_values` and a value of ``x`` is outside ``[low, high]``."""
    if x is None or not reads_values(x):
        return
    while is_functorch_wrapped_tensor(x):  # unwrap transforms of torch.func; vmap gives the whole batch
        x = get_unwrapped(x)
    if x.numel() and not bool((x >= low).all() & (x <= high).all()):
        raise ValueError(f"{name} must be in [{low}, {high}]{hint}, got {x.min():g} to {x.max():g}")


def check_gates(log_fgate: Tensor) -> None:
    """Checks the values of log forget gates with :func:`check_values`."""
    check_values("log_fgate", log_fgate, -math.inf, 0, " (logsigmoid of the gate's logits)")


def check_threshold(threshold: Any) -> None:
    """Checks the values of delta with :func:`check_values`."""
    hint = " (delta = -2U - log L + log epsilon; NaN under 'auto': q or k contains NaN)"
    if not isinstance(threshold, float):  # floats are validated by per_head_tensor
        check_values("adaptive_threshold", threshold, -math.inf, 0, hint)
