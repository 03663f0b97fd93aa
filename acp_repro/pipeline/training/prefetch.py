"""Prepares batches ahead of their use: a thread reads, pins and copies while the GPU computes."""

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

    On a GPU a batch is copied from pinned memory on a separate stream, so a copy hides behind the step before
    it. ``load`` gives tensors on the CPU and is called in another thread; its error rises at its place and
    ends the iteration.

    Attributes:
        waited_seconds: how long ``next`` has waited for batches in all.
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
            stream.wait_event(copied)  # the GPU waits, the host does not
            for tensor in batch:
                # Made on the copying stream: its memory must not be reused while it is in use here.
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """Stops the thread and drops the batches held ready; a second call does nothing."""
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
            if self.device.index is not None:  # a thread begins on GPU 0, and would open it
                torch.cuda.set_device(self.device)
            self._stream = torch.cuda.Stream(self.device)

    def _prepare(self, index: int) -> tuple[Batch, torch.cuda.Event | None]:
        batch = tuple(self._load(index))
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            # torch does not reuse pinned memory before a copy from it has ended.
            batch = tuple(x.pin_memory().to(self.device, non_blocking=True) for x in batch)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return batch, copied
