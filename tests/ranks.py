"""Runs functions on several ranks with gloo, each in a separate process.

The processes are forked from a server that has imported torch once, so each starts in milliseconds, and not
from the test process, whose threads would not survive a fork.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch._dynamo  # imported once here; otherwise each process would spend a second on it
import torch.distributed.checkpoint
import torch.distributed.fsdp

ROOT = Path(__file__).parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def run_on(
    ranks: int, folder: Path, work: Callable[..., None], *arguments, environment: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """Calls ``work(*arguments)``, a function of a module, in ``folder`` on each rank.

    ``work`` finds torchrun's variables in the environment, and in addition those of ``environment``.

    Returns:
        Each rank's exit code (0: done, negative: the signal that killed it) and its error message.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.chdir(ROOT):  # so that the server imports this checkout's module
        multiprocessing.forkserver.ensure_running()
    pairs = [_CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = []
    for rank, (_, pipe) in enumerate(pairs):
        variables = (environment or {}) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(_CONTEXT.Process(target=_work, args=(folder, variables, work, arguments, pipe)))
    for process, (_, pipe) in zip(processes, pairs, strict=True):
        process.start()
        pipe.close()
    ends = []
    for process, (messages, _) in zip(processes, pairs, strict=True):
        process.join(180)  # of a machine under load
        if process.is_alive():
            process.kill()
            process.join()
        try:
            message = messages.recv()
        except EOFError:
            message = "killed"
        ends.append((process.exitcode, message))
    return ends


def _work(folder, variables, work, arguments, pipe) -> None:
    os.chdir(folder)
    os.environ |= variables
    torch.set_num_threads(1)
    message = ""
    try:
        work(*arguments)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    pipe.send(message)
    raise SystemExit(bool(message))
