"""Several runs at once, each in its own process.

On a CPU each has one thread, because a small model gains little from a second core. On GPUs they are dealt
out in turn. With more runs than GPUs several share one, because a small model leaves most of it idle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from tqdm import tqdm

from ...common.command import STOP_SIGNALS, STOPPED, end_with_parent, stop_signals, usable_cores
from ...common.errors import UserError
from ..paper import Suite
from ..run import Run
from ..suite_file import load_suite
from .trainer import GOES_ON, Stopped, announce_stop, train


def train_side_by_side(suite: Suite, runs: list[Run], devices: list[torch.device], jobs: int | None) -> None:
    """Trains ``runs``, ``jobs`` at a time. After an error or a signal the running ones save a checkpoint.

    A process trains several runs one after the other, so data that a paper keeps in memory are read once per
    process. On a CPU each run has one thread whatever ``jobs`` is, so other runs do not change its bits.

    Args:
        devices: the CPU, or GPUs that the processes use in turn.
        jobs: default: one a core, or one a GPU.
    """
    on_cpu = devices[0].type == "cpu"
    jobs = min(jobs or (usable_cores() if on_cpu else len(devices)), len(runs))
    if jobs <= 1:
        if on_cpu:
            torch.set_num_threads(1)
        for run in runs:
            train(suite.paper, run, device=devices[0])
        return
    context = multiprocessing.get_context("spawn")
    places, lock = context.SimpleQueue(), context.RLock()
    for line in range(jobs):
        places.put((line, str(devices[line % len(devices)])))
    pool = ProcessPoolExecutor(jobs, context, _begin, (places, lock))
    with stop_signals(_stop):
        try:
            tasks = [pool.submit(_train, str(suite.path), run.name) for run in runs]
            for task in as_completed(tasks):
                task.result()
        except KeyboardInterrupt:
            announce_stop()
            if _end(list(pool._processes.values())):
                raise Stopped(GOES_ON) from None
            raise
        except BaseException:
            _end(list(pool._processes.values()))
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _stop(*_) -> None:
    """Any signal stops as Ctrl-C does. Later only Ctrl-C stops at once, because launchers repeat others."""
    for number in set(STOP_SIGNALS) - {signal.SIGINT}:
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _end(processes: list) -> bool:
    """Ends all processes; whether one saved a checkpoint first. A Ctrl-C in the meantime ends all at once."""
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise
    return any(process.exitcode == STOPPED for process in processes)


_line, _device = 0, torch.device("cpu")


def _begin(places, lock) -> None:
    global _line, _device
    for number in set(STOP_SIGNALS) - {signal.SIGTERM}:  # the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)
    tqdm.set_lock(lock)
    _line, device = places.get()
    _device = torch.device(device)
    if _device.type == "cuda":
        torch.cuda.set_device(_device)


def _train(suite_file: str, run_name: str) -> None:
    suite = load_suite(suite_file)
    try:
        train(suite.paper, suite.run(run_name), device=_device, report=tqdm.write, position=_line)
    except Stopped as stop:
        with contextlib.suppress(OSError):  # its reader may have ended
            tqdm.write(f"{run_name}: {stop}")
            sys.stdout.flush()
        os._exit(STOPPED)  # or the pool would give this process the next run
    except UserError as error:  # only its message is sent to the parent
        raise UserError(str(error)) from None
