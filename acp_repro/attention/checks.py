"""The checks of `forgetting_attention`. Each error is one sentence: the argument, and what is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .backends import BACKENDS, Backend, named


def check_arguments(q, k, v, log_fgate, *, head_first, seq_start, sm_scale, implementation) -> None:
    """Checks shapes, dtypes and devices: everything that needs no value of a tensor.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: a shape, device or option is wrong.
    """
    backend = named(implementation, "auto") or Backend
    layout = "(batch, heads, time, head_dim)" if head_first else "(batch, time, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {layout}, got shape {tuple(x.shape)}")
    if not isinstance(log_fgate, Tensor):
        raise TypeError(f"log_fgate must be a torch.Tensor, got {type(log_fgate).__name__}")

    if q.dtype not in backend.dtypes:
        takers = [name for name, one in BACKENDS.items() if q.dtype in one.dtypes]
        hint = f" ({str(q.dtype).removeprefix('torch.')}: implementation={takers[0]!r})" if takers else ""
        raise TypeError(f"q must be bfloat16, float16 or float32, got {q.dtype}{hint}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    if log_fgate.dtype not in {torch.float32, torch.float64}.intersection(backend.dtypes):
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
    if sm_scale is not None and not (
        isinstance(sm_scale, (int, float)) and math.isfinite(sm_scale) and sm_scale > 0
    ):
        raise ValueError(f"sm_scale must be a positive finite number or None, got {sm_scale!r}")


def check_seq_start(seq_start: Tensor | None, q: Tensor) -> None:
    """Checks ``seq_start`` (B,), the first real token of each row of ``q``. :func:`check_values` checks its
    values.

    Raises:
        TypeError, ValueError: shape, dtype or device is wrong.
    """
    if seq_start is None:
        return
    if not isinstance(seq_start, Tensor) or seq_start.dtype not in (torch.int32, torch.int64):
        raise TypeError("seq_start must be an int64 tensor of shape (batch,)")
    if seq_start.shape != q.shape[:1]:
        raise ValueError(f"seq_start must have shape ({q.shape[0]},), got {tuple(seq_start.shape)}")
    if seq_start.device != q.device:
        raise ValueError(f"seq_start must be on the device of q, {q.device}")


def check_window(window_size) -> None:
    """Checks that ``window_size`` is a number of keys or None.

    Raises:
        TypeError, ValueError: it is not.
    """
    if window_size is None:
        return
    if isinstance(window_size, bool) or not isinstance(window_size, int):
        raise TypeError(
            "window_size must be None or a whole number of keys, the query's own included (FlashAttention's "
            f"(left, 0) is left + 1), got {window_size!r}"
        )
    if window_size < 1:
        raise ValueError(
            f"window_size must be at least 1, the query's own key, or None for no window, got {window_size}"
        )


def check_packing(cu_seqlens, q, k, *, head_first: bool, seq_start) -> None:
    """Checks the starts of packed documents. Values are read on the CPU only, see :func:`check_values`.

    Raises:
        TypeError, ValueError: ``cu_seqlens`` is wrong, or does not fit another argument.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError("cu_seqlens must be an int32 or int64 tensor of shape (documents + 1,)")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must have shape (documents + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of q, {q.device}")
    time = 2 if head_first else 1
    if q.shape[0] != 1 or q.shape[time] != k.shape[time]:
        raise ValueError(
            "cu_seqlens needs a batch of one and as many queries as keys, got q "
            f"{tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if seq_start is not None:
        raise ValueError("cu_seqlens and seq_start cannot be used together: packed text has no padding")
    if torch.compiler.is_compiling() or (q.device.type != "cpu" and not torch.is_anomaly_enabled()):
        return
    length = k.shape[time]
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != length or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens must start with 0, end with the length {length} and never fall, "
            f"got {_shortened(cu_seqlens)}"
        )


def _shortened(x: Tensor) -> str:
    values = x.tolist()
    return str(values) if len(values) <= 8 else f"[{values[0]}, {values[1]}, ..., {values[-1]}]"


def threshold_tensor(adaptive_threshold, batch: int, heads: int, device) -> Tensor:
    """``adaptive_threshold``, a number or a tensor, as a (batch, heads) float32 tensor on ``device``.

    Raises:
        TypeError: it is neither a number nor a floating-point tensor.
        ValueError: a number is above 0 or NaN, or a tensor does not broadcast to (batch, heads).
    """
    rule = f"adaptive_threshold must be None, a number <= 0, 'auto', or a tensor broadcastable to \
({batch}, {heads})"
    if isinstance(adaptive_threshold, Tensor):
        if (
            adaptive_threshold.dtype == torch.float32
            and adaptive_threshold.shape == (batch, heads)
            and adaptive_threshold.device == device
        ):
            return adaptive_threshold.detach().contiguous().resolve_neg()
        if not adaptive_threshold.is_floating_point():
            raise TypeError(f"{rule}; got dtype {adaptive_threshold.dtype}")
        try:
            expanded = adaptive_threshold.detach().to(device, torch.float32).expand(batch, heads)
        except RuntimeError:
            raise ValueError(f"{rule}; got shape {tuple(adaptive_threshold.shape)}") from None
        return expanded.contiguous().resolve_neg()
    if isinstance(adaptive_threshold, bool) or not isinstance(adaptive_threshold, (int, float)):
        raise TypeError(f"{rule}; got {adaptive_threshold!r}")
    if not adaptive_threshold <= 0:
        raise ValueError(f"{rule}; got {adaptive_threshold}")
    # In the default dtype it might be rounded up, and then more would be pruned than requested.
    return torch.full((batch, heads), float(adaptive_threshold), dtype=torch.float32, device=device)


def check_values(log_fgate: Tensor, threshold: Tensor | None, seq_start: Tensor | None) -> None:
    """Checks values, which needs a read of the tensors.

    On a GPU the read would wait for the stream. So there it runs only under
    ``torch.autograd.set_detect_anomaly(True)``.

    Args:
        log_fgate: (B, H, T) float32.
        threshold: (B, H) float32 or None.
        seq_start: (B,) int64 or None.

    Raises:
        ValueError: a gate is above 0 or NaN, a threshold is positive or NaN, or a seq_start is out of range.
    """
    if log_fgate.device.type != "cpu" and not torch.is_anomaly_enabled():
        return
    seqlen_k = log_fgate.shape[2]
    if torch._C._are_functorch_transforms_active():
        log_fgate, threshold, seq_start = map(_whole, (log_fgate, threshold, seq_start))
    if not bool((log_fgate <= 0).all()):
        what = "NaN" if bool(log_fgate.isnan().any()) else f"{log_fgate.max().item():g}"
        raise ValueError(
            "log_fgate must hold logarithms of gates in (0, 1], so values at most 0 "
            f"(logsigmoid of the gate's logits), got {what}"
        )
    if threshold is not None and not bool((threshold <= 0).all()):
        cause = '; with "auto", q or k holds NaN' if bool(threshold.isnan().any()) else ""
        raise ValueError(
            "adaptive_threshold must be at most 0: it bounds a sum of log gates from below "
            f"(delta = -2U - log L + log epsilon), got {threshold.max().item():g}{cause}"
        )
    if seq_start is not None and not bool(((seq_start >= 0) & (seq_start < seqlen_k)).all()):
        raise ValueError(f"seq_start must lie in [0, seqlen_k = {seqlen_k}), got {seq_start.tolist()}")


def _whole(x: Tensor | None) -> Tensor | None:
    """The tensor inside the wrappers of torch.func, such as the whole batch under vmap. Only its values can
    be read."""
    while x is not None and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
