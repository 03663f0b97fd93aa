"""Ranks: one process, or several that torchrun starts, with DDP or FSDP2 around the model.

Without a process group every function works too, as one rank. Ranks of one run share a disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ...common.command import choose_device
from ...common.errors import UserError
from ..run import Run

T = TypeVar("T")


class DistributedError(UserError, RuntimeError):
    """The ranks cannot be set up; the message says what to start instead."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def process_group(device: str | None = None) -> Iterator[torch.device]:
    """Joins the ranks if torchrun started this process, and gives it its device, a GPU for each rank."""
    chosen = choose_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield chosen
        return
    if chosen.type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if chosen.index is not None or local >= gpus:
            raise DistributedError(
                f"{os.environ['LOCAL_WORLD_SIZE']} ranks on {device}: each takes one of {gpus} GPUs; "
                f"use --device cuda with --nproc-per-node {gpus} (make: NPROC={gpus}), or --device cpu"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
        dist.init_process_group("cpu:gloo,cuda:nccl")  # small messages go through the CPU
    else:
        dist.init_process_group("gloo")
    yield chosen
    # Not in a `finally`: after an error of one rank this would wait for the others. torchrun ends them all
    # once this process has ended. Errors of all ranks are handled inside.
    dist.destroy_process_group()


def check_ranks(run: Run, micro_batches: int, sharing: int = 1) -> None:
    """Checks that each group of ``sharing`` ranks gets the same number of the ``micro_batches`` of a step."""
    ranks = world_size()
    if ranks % sharing or micro_batches % (ranks // sharing):
        possible = [str(n * sharing) for n in range(1, micro_batches + 1) if micro_batches % n == 0]
        together = f", {sharing} ranks to each (context_parallel)" if sharing > 1 else ""
        raise DistributedError(
            f"{run.name}: {ranks} ranks cannot share the {micro_batches} micro-batches of a step equally"
            f"{together}; "
            f"use NPROC={' or '.join(possible[-4:])}"
        )


def context_group(sharing: int, device: torch.device) -> dist.ProcessGroup:
    """The ``sharing`` ranks, neighbours, that hold shards of the same sequences as this rank."""
    shape = (world_size() // sharing, sharing)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "context")).get_group("context")


def launch_ranks(ranks: int, module: str, arguments: list[str]) -> int:
    """Runs ``python -m module arguments`` as ``ranks`` processes of this machine, and waits for them.

    Gives 0, or 1 if one of them failed. Rank 0 has then printed what is wrong; or, after a signal
    (KeyboardInterrupt), what was saved.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Rank 0 prints the error in one line; the launcher's own report would fill a page.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "--", module, *arguments]))
    except ChildFailedError:
        return 1
    except SignalException:
        raise KeyboardInterrupt from None
    return 0


def parallelize(model: nn.Module, blocks: Sequence[nn.Module], mode: str, device: torch.device) -> nn.Module:
    """Wraps ``model`` so that gradients are means over ranks; call the result instead of ``model``.

    FSDP2 shards ``model`` in place, one group of weights a block. Weights stay float32 and products stay
    under autocast, as on one rank, so the numbers agree within rounding.

    Args:
        model: with the same weights on every rank.
        blocks: the parts that are sharded one by one.
        mode: ``none``, ``ddp`` or ``fsdp``.
        device: the model's device.
    """
    if mode == "ddp":
        # Blocks are compiled one by one, so splitting their graphs at DDP's buckets would gain nothing.
        torch._dynamo.config.optimize_ddp = False
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if mode == "fsdp":
        # The output of forward may be a view; nothing writes into it.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view", UserWarning)
        mesh = init_device_mesh(device.type, (world_size(),))
        # Whole weights stay between micro-batches, so they are sent once a step; see gradient_sync.
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


@contextlib.contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Forward and backward inside add to the gradient. Ranks share it only if ``enabled``.

    FSDP2 then also frees the whole weights and gradients. Until then each rank holds them, 8 bytes a weight;
    sharding saves the optimiser's 8 bytes.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_reshard_after_backward(enabled)
    if isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of each rank's ``value``, any shape and dtype, on every rank. The host does not wait for a
    GPU."""
    if world_size() == 1:
        return value
    value = value.clone()
    dist.all_reduce(value)  # a sum, because gloo has no mean
    return value / world_size()


def any_rank(*flags: bool) -> list[bool]:
    """For each flag whether it is set on any rank; the same on every rank. All ranks must call."""
    if world_size() == 1:
        return list(flags)
    values = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.bool().tolist()


def on_rank_zero(action: Callable[[], T]) -> T:
    """Rank 0 runs ``action``. Every rank gets its result or raises its error. All ranks must call."""
    if world_size() == 1:
        return action()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # the others wait for this rank's outcome, also after an error
            outcome[1] = error
    dist.broadcast_object_list(outcome, device=torch.device("cpu"))
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
