"""One optimiser step over several micro-batches, on one rank or on several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .distributed import gradient_sync, mean_over_ranks


def train_step(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    loss_of: Callable[..., Tensor],
    batches: Iterator[tuple[Tensor, ...]],
    num_batches: int,
    *,
    max_grad_norm: float,
    dtype: str,
) -> tuple[Tensor, Tensor]:
    """One optimiser step over ``num_batches`` micro-batches of equal size on each rank.

    Args:
        model: the model, or its wrapper from ``distributed.parallelize``.
        optimizer: from ``make_optimizer``.
        loss_of: ``loss_of(model, *batch)``, the mean loss of a batch; see ``Task.loss``.
        batches: gives batches of tensors, this rank's share of the step.
        max_grad_norm: longer gradients are scaled down to this norm.
        dtype: ``bfloat16`` (autocast over float32 weights) or ``float32``.

    Returns:
        Mean loss in nats and the gradient's norm before clipping, of all ranks, as float32 scalars on
        the device: reading them would make the host wait.
    """
    optimizer.zero_grad(set_to_none=True)
    total = accumulate_gradients(model, loss_of, batches, num_batches, dtype=dtype)
    return total, update(model, optimizer, max_grad_norm)


def accumulate_gradients(
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    batches: Iterator[tuple[Tensor, ...]],
    num_batches: int,
    *,
    dtype: str,
) -> Tensor:
    """The first half of :func:`train_step`: adds gradients of the mean loss; returns that loss, a float32
    scalar."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for index in range(num_batches):
        batch = [x.to(device, non_blocking=True) for x in next(batches)]
        with gradient_sync(model, index == num_batches - 1):
            with autocast(device, dtype):
                loss = loss_of(model, *batch) / num_batches
            loss.backward()
        total += loss.detach()
    return mean_over_ranks(total)


def update(model: nn.Module, optimizer: torch.optim.AdamW, max_grad_norm: float) -> Tensor:
    """The second half of :func:`train_step`: clips the gradients and updates the weights.

    Returns:
        The gradient's norm before clipping, a float32 scalar.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    optimizer.step()
    return norm


def autocast(device: torch.device, dtype: str):
    """bfloat16 autocast over float32 weights, or nothing for float32."""
    enabled = dtype == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


@contextlib.contextmanager
def eager(device: torch.device, dtype: str) -> Iterator[None]:
    """Inside, torch.compile is off, and the dtype's autocast is on."""
    with torch.compiler.set_stance("force_eager"), autocast(device, dtype):
        yield


def compile_blocks(blocks: Sequence[nn.Module], backend: str = "inductor", whole: bool = True) -> None:
    """Sends each block's forward through torch.compile, in place: one graph that all blocks share, or without
    ``whole`` several, where a block exchanges tokens with other ranks.

    Names of weights stay. Only ``forward`` is compiled, not the call around it, so FSDP2's hooks and gradient
    checkpointing stay outside the graph. Graphs of other models are dropped, because torch.compile keeps only
    a few graphs for one function.
    """
    torch.compiler.reset()
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=whole, dynamic=False, backend=backend)


@contextlib.contextmanager
def compiled_blocks(blocks: Sequence[nn.Module], enabled: bool) -> Iterator[None]:
    """:func:`compile_blocks` inside, if ``enabled``, and eager blocks again after it."""
    if enabled:
        compile_blocks(blocks)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)
