"""The timer of all comparisons, and the peak memory of a call.

The first call, or a call after heavier work, runs under other conditions: temperature, load and clock rate.
Calls are therefore interleaved, and their order is balanced.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from acp_repro.common.command import progress_bar

Call = Callable[[], Any]
Clock = Callable[[Call, torch.device], float]  # milliseconds of one call
Name = TypeVar("Name", bound=Hashable)

# The value of column `order` for calls interleaved by `orders`; the column is empty for a fixed order.
ORDER = "balanced"
# About 6 ms: the host queues the call while the GPU is busy, so the GPU's clock excludes host overhead.
_HEAD_START_CYCLES = 12_000_000
_CPU_IN_TRACE = 0  # "Device Type" in a profiler's trace


def device_ms(call: Call, device: torch.device) -> float:
    """Milliseconds on the device; on a GPU this excludes waiting for the host."""
    if device.type != "cuda":
        return wall_ms(call, device)
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def wall_ms(call: Call, device: torch.device) -> float:
    """Milliseconds from an idle device until the device has finished the call."""
    return host_ms(lambda: (call(), _wait(device)), device)


def host_ms(call: Call, device: torch.device) -> float:
    """Milliseconds from an idle device until the host has launched the call."""
    _wait(device)  # otherwise a full launch queue could block the host
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def orders(names: Iterable[Name], repeats: int) -> Iterator[list[Name]]:
    """The order of each turn, in which each name has every position, and every other name before it, equally
    often.

    The orders are a Williams design: shifts of a zigzag over the names, each followed by its reverse. There
    are ``repeats`` turns, rounded up to an even number if there are several names.
    """
    names = list(names)
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(len(names))]  # 0 1 -1 2 -2 ...
    for turn in range(repeats + repeats % 2 * (len(names) > 1)):
        order = [names[(step + turn // 2) % len(names)] for step in zigzag]
        yield order[::-1] if turn % 4 in (1, 2) else order  # consecutive turns often meet at one name


def interleaved(
    calls: Mapping[Name, Call],
    device: torch.device,
    repeats: int,
    clock: Clock = device_ms,
    *,
    warm_ups: int = 1,
    title: str | None = None,
) -> dict[Name, list[float]]:
    """Milliseconds of each call in each turn, in the order of :func:`orders`, after ``warm_ups`` untimed
    turns. ``title`` labels a progress bar; None shows no bar."""
    times: dict[Name, list[float]] = {name: [] for name in calls}
    turns = [list(calls)] * warm_ups + list(orders(calls, repeats))
    with progress_bar(
        total=len(turns) * len(calls), desc=title, unit="pass", leave=False, disable=title is None
    ) as progress:
        for turn, order in enumerate(turns):
            for name in order:
                milliseconds = clock(calls[name], device)
                if turn >= warm_ups:
                    times[name].append(milliseconds)
                progress.update()
    return times


def in_columns(**times: Sequence[float]) -> dict[str, Any]:
    """The median of each call's milliseconds and all samples as a string; None without samples."""
    each = {f"{k}_samples_ms": " ".join(f"{x:.5g}" for x in v) or None for k, v in times.items()}
    return {f"{k}_ms": median(v) if v else None for k, v in times.items()} | each


def peak_memory(work: Call, device: torch.device) -> int:
    """The peak number of bytes of tensors in ``work``, in addition to those allocated before."""
    if device.type == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return largest_sum(json.loads(trace.read_text())["traceEvents"])


def largest_sum(events: list[dict[str, Any]]) -> int:
    """The peak number of allocated bytes, from the events of a CPU trace."""
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == _CPU_IN_TRACE]
    live = peak = 0
    for event in sorted(memory, key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]  # negative when memory is freed
        peak = max(peak, live)
    return peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
