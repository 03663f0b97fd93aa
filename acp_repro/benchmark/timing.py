"""Clocks: CUDA events on a GPU, the host's clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# About 2 ms: the host queues a call while the GPU is busy, so the GPU's clock sees no waiting for it.
_HEAD_START_CYCLES = 4_000_000


def elapsed_ms(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Milliseconds that ``call`` took on ``device``, and what it returned."""
    if device.type == "cuda":
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end), result
    begin = time.perf_counter()
    result = call()
    return (time.perf_counter() - begin) * 1e3, result
