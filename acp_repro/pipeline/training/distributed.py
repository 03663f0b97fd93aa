"""Distributed training: one process, or several ranks started by torchrun, with DDP or FSDP2.

Without a process group all functions work as on one rank. The ranks of a run share a disk.
"""

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
    """The ranks cannot be set up; the message names a valid number of ranks or device."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def process_group(device: str | None = None) -> Iterator[torch.device]:
    """A context with the device of this process, one GPU per rank; joins the ranks if torchrun started it."""
    chosen = choose_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield chosen
        return
    if chosen.type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if chosen.index is not None or local >= gpus:
            raise DistributedError(
                f"{os.environ['LOCAL_WORLD_SIZE']} ranks on {device} need one GPU each, of {gpus} GPUs; "
                f"use --device cuda with --nproc-per-node {gpus} (make: NPROC={gpus}), or --device cpu"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
        dist.init_process_group("cpu:gloo,cuda:nccl")  # small messages are sent from the CPU
    else:
        dist.init_process_group("gloo")
    yield chosen
    # Not in a `finally`: after an error on one rank this call would wait for the others. torchrun terminates
    # them when this process ends. Errors that all ranks raise are handled inside the context.
    dist.destroy_process_group()


def check_ranks(run: Run, micro_batches: int, sharing: int = 1) -> None:
    """Checks that the ``micro_batches`` of a step divide evenly among groups of ``sharing`` ranks."""
    ranks = world_size()
    if ranks % sharing or micro_batches % (ranks // sharing):
        possible = [str(n * sharing) for n in range(1, micro_batches + 1) if micro_batches % n == 0]
        together = f", {sharing} ranks per micro-batch (context_parallel)" if sharing > 1 else ""
        raise DistributedError(
            f"{run.name}: {ranks} ranks cannot divide the {micro_batches} micro-batches of a step evenly"
            f"{together}; use NPROC={' or '.join(possible[-4:])}"
        )


def context_group(sharing: int, device: torch.device) -> dist.ProcessGroup:
    """The group of ``sharing`` consecutive ranks, with this rank, that have shards of the same sequences."""
    shape = (world_size() // sharing, sharing)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "context")).get_group("context")


def launch_ranks(ranks: int, module: str, arguments: list[str]) -> int:
    """Runs ``python -m module arguments`` as ``ranks`` processes on this machine, and waits for them.

    Returns 0, or 1 if a process failed; rank 0 prints the error. After a signal it raises KeyboardInterrupt,
    and rank 0 prints which checkpoint was saved.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Rank 0 prints the error in one line; the launcher's own report is a page long.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "--", module, *arguments]))
    except ChildFailedError:
        return 1
    except SignalException:
        raise KeyboardInterrupt from None
    return 0


def parallelize(model: nn.Module, blocks: Sequence[nn.Module], mode: str, device: torch.device) -> nn.Module:
    """Wraps ``model`` so that gradients are averaged over ranks; call the result instead of ``model``.

    FSDP2 shards ``model`` in place, with one group of weights per block. As on one rank, weights are float32
    and matrix products run under autocast, so the results agree within rounding.

    Args:
        model: a model with the same weights on every rank.
        blocks: the submodules that are sharded separately.
        mode: ``none``, ``ddp`` or ``fsdp``.
        device: the model's device.
    """
    if mode == "ddp":
        # Blocks are compiled separately, so splitting their graphs at DDP's buckets has no benefit.
        torch._dynamo.config.optimize_ddp = False
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if mode == "fsdp":
        # The output of forward may be a view; nothing writes into it.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* view", UserWarning)
        mesh = init_device_mesh(device.type, (world_size(),))
        # Unsharded weights are kept between micro-batches, so each step gathers them once; see gradient_sync.
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


@contextlib.contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """A context in which backward passes accumulate gradients, and synchronise ranks if ``enabled``.

    With ``enabled``, FSDP2 also frees the unsharded weights and gradients. Until then each rank stores 8
    bytes per weight for them; sharding saves only the 8 bytes per weight of the optimiser.
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
    """The mean of ``value``, of any shape and dtype, over ranks, on every rank; the host does not
    synchronise."""
    if world_size() == 1:
        return value
    value = value.clone()
    dist.all_reduce(value)  # a sum, because gloo has no mean
    return value / world_size()


def any_rank(*flags: bool) -> list[bool]:
    """Whether each flag is set on any rank; the result is the same on all ranks. All ranks must call."""
    if world_size() == 1:
        return list(flags)
    values = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.bool().tolist()


def on_rank_zero(action: Callable[[], T]) -> T:
    """Runs ``action`` on rank 0; every rank returns its result or raises its error. All ranks must call."""
    if world_size() == 1:
        return action()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # the other ranks wait for the outcome, also after an error
            outcome[1] = error
    dist.broadcast_object_list(outcome, device=torch.device("cpu"))
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
