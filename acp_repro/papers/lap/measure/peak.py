"""The most memory that a piece of work holds at once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CPU = 0  # "Device Type" in a trace


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """The largest sum of tensors that are alive at once while ``work`` runs, above what was there before.

    On a GPU PyTorch's allocator counts; on a CPU its profiler does, which notes every allocation.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would say when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return largest_sum(json.loads(trace.read_text())["traceEvents"])


def largest_sum(events: list[dict[str, Any]]) -> int:
    """The most bytes that are allocated and not yet freed, from the events of a trace on the CPU."""
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == CPU]
    held = most = 0
    for event in sorted(memory, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]  # negative where memory is freed
        most = max(most, held)
    return most
