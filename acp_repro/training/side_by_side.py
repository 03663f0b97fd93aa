"""Several small runs on a CPU at once, one thread each: a small model gains little from a second core."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait

import torch
from tqdm import tqdm

from ..chain.paper import Suite
from ..chain.run import Run
from ..chain.suite import load_suite
from ..common.errors import UserError
from .loop import train


def train_side_by_side(
    suite: Suite, runs: list[Run], jobs: int | None, watch_every: int | None, tensorboard: bool
) -> int:
    """Trains ``runs`` on the CPU, ``jobs`` at a time (default: one a core); returns the exit code.

    Each run has one thread whatever ``jobs`` is, so its bits do not depend on what runs beside it.

    Raises:
        UserError: the first error of any run, once those under way have stopped at a checkpoint or ended.
    """
    jobs = min(jobs or usable_cores(), len(runs))
    if jobs <= 1:
        torch.set_num_threads(1)
        for run in runs:
            train(
                suite.paper, run, device=torch.device("cpu"), watch_every=watch_every, tensorboard=tensorboard
            )
        return 0
    context = multiprocessing.get_context("spawn")
    lines, lock = context.SimpleQueue(), context.RLock()
    for line in range(jobs):
        lines.put(line)
    pool = ProcessPoolExecutor(jobs, context, _begin, (lines, lock))
    try:
        tasks = [pool.submit(_train, suite.name, run.name, watch_every, tensorboard) for run in runs]
        done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
        for task in done:
            task.result()
    except BaseException:
        for process in pool._processes.values():  # those under way go on from their last checkpoint
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return 0


def usable_cores() -> int:
    """How many cores this process may use: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_line = 0


def _begin(lines, lock) -> None:
    global _line
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(1)
    tqdm.set_lock(lock)
    _line = lines.get()


def _train(suite_name: str, run_name: str, watch_every: int | None, tensorboard: bool) -> None:
    suite = load_suite(suite_name)
    run = suite.run(run_name)
    try:
        train(
            suite.paper,
            run,
            device=torch.device("cpu"),
            report=tqdm.write,
            watch_every=watch_every,
            tensorboard=tensorboard,
            position=_line,
        )
    except UserError as error:  # whatever it holds, only its words must travel
        raise UserError(str(error)) from None
