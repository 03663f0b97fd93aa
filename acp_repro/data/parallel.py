"""Text to ids on every core, in the order of the documents.

The library that encodes leaves Python's lock while it works, but for a sixteenth of the time, in which
ids become a list: threads stop paying there, so several workers are several processes. They are plain
programs that talk over pipes. So a script without ``if __name__ == "__main__"``, a notebook, and a process
that holds a GPU or a lock can all use them, which is not so for forked or spawned copies of themselves: a
spawned pool of the standard library is about as fast, but runs an unguarded script again in every worker.
Memory is bounded: at most two groups of documents a worker are under way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from acp_repro.data.files import DataError
from acp_repro.data.sources import Document
from acp_repro.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer

_GROUP_BYTES = 1 << 20  # of text in one message: small reviews go together, a book goes alone
_FEW_GROUPS = 8  # less than these are done before a process has started

Labelled = tuple[str, Document]  # a document with the name of its split


def usable_cores() -> int:
    """How many cores this process may use: in a container, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tokenise(
    labelled: Iterable[Labelled], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[tuple[str, Document, np.ndarray]]:
    """Give (split, document, ids) in the order of ``labelled``, the same for any ``workers``.

    ``ids`` is (tokens,) of unsigned integers. ``workers`` is the number of processes, by default that of
    the cores; 1, or a tokeniser of bytes, or little text, needs no process but this one.

    Raises:
        DataError: a worker died; besides, what reading the documents raises.
    """
    if workers is not None and workers < 1:
        raise DataError(f"workers: {workers} must be at least 1; leave it out to use every core")
    workers = workers or usable_cores()
    groups = _groups(labelled)
    if workers == 1 or isinstance(tokenizer, ByteTokenizer):
        few, many = groups, False
    else:
        few = list(itertools.islice(groups, _FEW_GROUPS))
        many = len(few) == _FEW_GROUPS
    if not many:
        for split, document in itertools.chain.from_iterable(few):
            yield split, document, tokenizer.encode(document.data)
        return
    with _Workers(workers, tokenizer.json_text) as pool:
        for group, ids in _in_order(pool.encode, itertools.chain(few, groups), workers):
            for (split, document), one in zip(group, ids, strict=True):
                yield split, document, one


def _groups(labelled: Iterable[Labelled]) -> Iterator[list[Labelled]]:
    group, size = [], 0
    for one in labelled:
        group.append(one)
        size += len(one[1].data)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _in_order(
    encode: Callable[[list[Labelled]], list[np.ndarray]], groups: Iterable[list[Labelled]], workers: int
) -> Iterator[tuple[list[Labelled], list[np.ndarray]]]:
    waiting: deque = deque()
    with ThreadPoolExecutor(workers) as threads:  # each waits for one process
        try:
            for group in groups:
                waiting.append((group, threads.submit(encode, group)))
                if len(waiting) > 2 * workers:  # a bound on the memory, not on the speed
                    group, ids = waiting.popleft()
                    yield group, ids.result()
            while waiting:
                group, ids = waiting.popleft()
                yield group, ids.result()
        finally:
            for _, ids in waiting:  # the reader failed or the caller stopped: drop the rest
                ids.cancel()


class _Workers:
    """Processes that do `work`, each fed by whoever takes it from the queue."""

    def __init__(self, count: int, json_text: str):
        here = str(Path(__file__).parents[2])  # where this very package lies, installed or not
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        # One thread each; the processes are what fills the cores.
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        self._all: list[subprocess.Popen] = []
        self._free: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        self._json_text = json_text
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", "from acp_repro.data.parallel import work; work()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            self._all.append(process)
            self._free.put(process)

    def __enter__(self) -> _Workers:
        try:
            for process in self._all:
                self._send(process, self._json_text)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in self._all:
            with contextlib.suppress(OSError):  # a dead one's pipe is broken
                process.stdin.close()  # its sign to leave
        for process in self._all:
            process.wait()
            process.stdout.close()

    def encode(self, group: list[Labelled]) -> list[np.ndarray]:
        process = self._free.get()
        try:
            self._send(process, [document.data for _, document in group])
            return pickle.load(process.stdout)  # from our own child, which runs our own code
        except (EOFError, pickle.UnpicklingError):
            raise self._died(process) from None
        finally:
            self._free.put(process)

    def _send(self, process: subprocess.Popen, message: object) -> None:
        try:
            pickle.dump(message, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
        except OSError:
            raise self._died(process) from None

    def _died(self, process: subprocess.Popen) -> DataError:
        return DataError(
            f"a tokenising process ended with exit code {process.wait()} (-9: killed, mostly for its "
            "memory); tokenise with fewer: python -m acp_repro.data --workers 1"
        )


def work() -> None:
    """What a worker does: a tokeniser, then lists of texts in, lists of arrays out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides, and closes the pipe
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # so that no word of a library lands among the replies
    with contextlib.suppress(EOFError, BrokenPipeError):
        tokenizer = BPETokenizer(pickle.load(sys.stdin.buffer))
        while True:
            texts = pickle.load(sys.stdin.buffer)
            pickle.dump([tokenizer.encode(text) for text in texts], replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
