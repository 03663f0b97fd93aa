"""Prefetches batches: a thread reads, pins and copies them while the GPU computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]


class Prefetcher(AbstractContextManager):
    """An iterator over ``load(index)`` for each index, in order, on ``device``.

    On a GPU, batches are copied from pinned memory on a separate stream, so that copies overlap with the
    previous step. ``load`` returns tensors on the CPU and runs in another thread; ``next`` raises its error
    for the same index, and the iteration ends.

    Attributes:
        waited_seconds: the total time that ``next`` has waited for batches.
    """

    def __init__(
        self, load: Callable[[int], Batch], indices: Iterable[int], device: torch.device | str, depth: int = 4
    ):
        self.device = torch.device(device)
        self.waited_seconds = 0.0
        self._load, self._indices = load, iter(indices)
        self._stream: torch.cuda.Stream | None = None
        self._thread = ThreadPoolExecutor(1, "prefetch", self._open_stream)
        self._ahead: deque[Future] = deque()
        for _ in range(depth):
            self._submit()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Batch:
        if not self._ahead:
            raise StopIteration
        started = time.perf_counter()
        try:
            batch, copied = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._submit()
        self.waited_seconds += time.perf_counter() - started
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)  # only the GPU waits
            for tensor in batch:
                # Allocated on the copy stream: its memory must not be reused while this stream reads it.
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """Stops the thread and drops the prefetched batches; a second call does nothing."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __exit__(self, *_) -> None:
        self.close()

    def _submit(self) -> None:
        for index in self._indices:
            self._ahead.append(self._thread.submit(self._prepare, index))
            return

    def _open_stream(self) -> None:
        if self.device.type == "cuda":
            if self.device.index is not None:  # otherwise the thread would create a context on GPU 0
                torch.cuda.set_device(self.device)
            self._stream = torch.cuda.Stream(self.device)

    def _prepare(self, index: int) -> tuple[Batch, torch.cuda.Event | None]:
        batch = tuple(self._load(index))
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            # torch does not reuse pinned memory before copies from it have finished.
            batch = tuple(x.pin_memory().to(self.device, non_blocking=True) for x in batch)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return batch, copied
