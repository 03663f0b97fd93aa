"""Prepares batches ahead of their use: a thread reads, pins and copies while the GPU computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]


class Prefetcher:
    """An iterator over ``load(index)`` for each index, in order, on ``device``.

    On a GPU a batch is copied from pinned memory on a separate stream, so a copy hides behind the step before
    it. ``load`` gives tensors on the CPU and is called in another thread; its error rises at its place.

    Attributes:
        waited_seconds: how long ``next`` has waited for batches in all.
    """

    def __init__(
        self, load: Callable[[int], Batch], indices: Iterable[int], device: torch.device | str, depth: int = 4
    ):
        self.device = torch.device(device)
        self.waited_seconds = 0.0
        self._load = load
        self._ready: queue.Queue = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(iter(indices),), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        started = time.perf_counter()
        batch, copied, error = self._ready.get()
        self.waited_seconds += time.perf_counter() - started
        if batch is None:
            self.close()
            raise error or StopIteration
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)  # the GPU waits, the host does not
            for tensor in batch:
                # Made on the copying stream: its memory must not be reused while it is in use here.
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """Stops the thread and drops the batches held ready; a second call does nothing."""
        self._closed.set()
        while self._thread.is_alive():
            try:  # the thread may be waiting for room
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _work(self, indices) -> None:
        error = None
        try:
            stream = None
            if self.device.type == "cuda":
                if self.device.index is not None:  # a thread begins on GPU 0, and would open it
                    torch.cuda.set_device(self.device)
                stream = torch.cuda.Stream(self.device)
            while not self._closed.is_set():
                try:
                    index = next(indices)
                except StopIteration:
                    break
                batch, copied = tuple(self._load(index)), None
                if stream is not None:
                    batch, copied = self._copy(batch, stream)
                self._ready.put((batch, copied, None))
        except BaseException as caught:  # the reader would otherwise wait for ever
            error = caught
        self._ready.put((None, None, error))

    def _copy(self, batch: Batch, stream) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            # torch does not reuse pinned memory before a copy from it has ended.
            batch = tuple(x.pin_memory().to(self.device, non_blocking=True) for x in batch)
            copied = torch.cuda.Event()
            copied.record(stream)
        return batch, copied
