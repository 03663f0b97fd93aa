"""Training in other processes: several ranks with gloo, or one that is to be killed.

They are forked from a server that has imported torch once, so each starts in milliseconds, and not from
the test process, whose threads would not survive a fork.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch._dynamo  # an optimizer imports it: else each process would, for a second
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.distributed import process_group
from acp_repro.pipeline.training.trainer import train

ROOT = Path(__file__).parents[2]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def train_on(
    ranks: int,
    folder: Path,
    name: str,
    *,
    stop_after: int | None = None,
    before: Callable[[], None] | None = None,
    environment: dict[str, str] | None = None,
) -> list[tuple[int, str]]:
    """Trains run ``name`` of the suite ``mini`` under ``folder`` on ``ranks`` ranks.

    Args:
        before: called in each process first; a function of a test module.
        environment: variables set in each process before that.

    Returns:
        Each rank's exit code (0: done, negative: the signal that killed it) and its error message.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.chdir(ROOT):  # where the server finds this module, and not another checkout's
        multiprocessing.forkserver.ensure_running()
    pairs = [_CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        _CONTEXT.Process(
            target=_work, args=(rank, ranks, port, folder, name, stop_after, before, environment or {}, pipe)
        )
        for rank, (_, pipe) in enumerate(pairs)
    ]
    for process, (_, pipe) in zip(processes, pairs, strict=True):
        process.start()
        pipe.close()
    ends = []
    for process, (messages, _) in zip(processes, pairs, strict=True):
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
        try:
            message = messages.recv()
        except EOFError:
            message = "killed"
        ends.append((process.exitcode, message))
    return ends


def _work(rank, ranks, port, folder, name, stop_after, before, environment, pipe) -> None:
    os.chdir(folder)
    os.environ |= environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    message = ""
    if before is not None:
        before()
    with process_group("cpu") as device:
        try:
            train(PAPER, load_suite("mini").run(name), device=device, stop_after=stop_after)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
    pipe.send(message)
    raise SystemExit(bool(message))
