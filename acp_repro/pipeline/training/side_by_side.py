"""Trains several runs concurrently, each in its own process.

On a CPU each process has one thread, because a small model gains little from a second core. GPUs are assigned
round-robin. If there are more runs than GPUs, several share one, because a small model leaves most of a GPU
idle.
"""

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
    """Trains ``runs``, ``jobs`` at a time. After an error or a signal, active runs save a checkpoint.

    A process trains several runs in sequence, so it loads data that a paper caches in memory only once. On a
    CPU each run has one thread for any ``jobs``, so concurrent runs do not change its weights bitwise.

    Args:
        devices: the CPU, or GPUs, which are assigned to processes round-robin.
        jobs: the number of processes; by default one per core, or one per GPU.
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
    """Treats any stop signal as Ctrl-C. Later ones are ignored, except Ctrl-C: launchers repeat signals."""
    for number in set(STOP_SIGNALS) - {signal.SIGINT}:
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _end(processes: list) -> bool:
    """Terminates all processes; returns whether one saved a checkpoint. Ctrl-C meanwhile kills them all."""
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
    for number in set(STOP_SIGNALS) - {signal.SIGTERM}:  # the parent process handles them
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
        with contextlib.suppress(OSError):  # the reader of stdout may have ended
            tqdm.write(f"{run_name}: {stop}")
            sys.stdout.flush()
        os._exit(STOPPED)  # otherwise the pool would start the next run in this process
    except UserError as error:  # only the message is sent to the parent
        raise UserError(str(error)) from None
