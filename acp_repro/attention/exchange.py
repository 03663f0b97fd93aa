"""Exchanges between the ranks of context parallelism: shards of a sequence, single tokens, and collectives.

In compiled code an exchange is an operator, which takes the name of the process group; eager calls run the
same function directly.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from .op import _needs_no_operator

# PyTorch 2.13 deprecates the second name, which earlier versions have. With a list of results, NCCL would
# copy each of them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def find_group(context_parallel: Any) -> dist.ProcessGroup:
    """The process group of the argument ``context_parallel``.

    Raises:
        TypeError: ``context_parallel`` is neither a process group nor a one-dimensional device mesh.
    """
    group = context_parallel
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "context_parallel must be a torch.distributed.ProcessGroup or a DeviceMesh of one dimension, got "
            f"{context_parallel!r}"
        )
    return group


def own_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """The indices of the two chunks of the sequence that ``rank`` owns, in ascending order."""
    return rank, 2 * ranks - 1 - rank


def shard_positions(tokens: int, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """(tokens,) int64: the positions of this rank's tokens in the sequence."""
    if group is None:
        return torch.arange(tokens, device=device)
    chunks = torch.tensor(own_chunks(group.rank(), group.size()), device=device)
    size = tokens // 2
    return (chunks[:, None] * size + torch.arange(size, device=device)).flatten()


def shard_sequence(x: Tensor, group: Any, dim: int = 1) -> Tensor:
    """This rank's shard of ``x``: two chunks of the sequence, an early and a late one, along ``dim``.

    Args:
        x: the full tensor, identical on every rank of the group.
        group: a ``torch.distributed.ProcessGroup``, or a ``DeviceMesh`` of one dimension.
        dim: the dimension of the sequence. Its length must be a multiple of twice the number of ranks.

    Returns:
        ``x`` with 1 / ranks of the length. The backward pass gathers the full gradient of ``x`` on every
        rank.

    Raises:
        TypeError: ``group`` is neither a process group nor a one-dimensional device mesh.
        ValueError: the length is not a multiple of twice the number of ranks.
    """
    group = find_group(group)
    length, ranks = x.shape[dim], group.size()
    if length % (2 * ranks):
        raise ValueError(
            f"the length of dimension {dim}, {length}, must be a multiple of twice the {ranks} ranks; pad "
            "the sequence on the right"
        )
    return exchange(x, "shard", dim, group)


def gather_sequence(x: Tensor, group: Any, dim: int = 1) -> Tensor:
    """The full tensor, on every rank, from the shards of :func:`shard_sequence`.

    Args:
        x: this rank's shard. group, dim: as in :func:`shard_sequence`.

    Returns:
        The tensor with ``ranks`` times the length of ``x``. Every rank must compute the same loss from it,
        because the gradient of ``x`` is this rank's shard of the gradient, not a sum over ranks.
    """
    return exchange(x, "gather", dim, find_group(group))


def previous_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, 2, ...): the token before each of this rank's two chunks of ``x`` (B, T, ...), 0 before the first.

    One all-to-all sends one token to each neighbour, and the backward pass returns the gradients.
    """
    return exchange(x.unflatten(1, (2, -1))[:, :, -1], "send to next", 1, group)


# The linear exchanges between ranks, each with the one that returns the gradients.
_INVERSE = {
    "gather": "shard",
    "shard": "gather",
    "send to next": "send to previous",
    "send to previous": "send to next",
}


def exchange(x: Tensor, kind: str, dim: int, group: dist.ProcessGroup) -> Tensor:
    if _needs_no_operator((x,)):
        return _Exchange.apply(x, kind, dim, group)
    return exchange_op(x, kind, dim, group.group_name)


def _run_exchange(x: Tensor, kind: str, dim: int, group: dist.ProcessGroup) -> Tensor:
    if kind == "shard":
        parts = x.chunk(2 * group.size(), dim)
        return torch.cat([parts[n] for n in own_chunks(group.rank(), group.size())], dim)
    if kind == "gather":
        return join_shards(all_gather(x.movedim(dim, 0), group)).movedim(0, dim)
    return _move(x, group, 1 if kind == "send to next" else -1)


class _Exchange(torch.autograd.Function):
    """An exchange without operators."""

    @staticmethod
    def forward(ctx, x, kind, *where):
        ctx.options = (_INVERSE[kind], *where)
        return _run_exchange(x, kind, *where)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _run_exchange(grad, *ctx.options), None, None, None


exchange_op = torch.library.custom_op(
    "acp_repro::exchange",
    lambda x, kind, dim, group: _run_exchange(x, kind, dim, _resolve_process_group(group)).contiguous(),
    mutates_args=(),
    schema="(Tensor x, str kind, int dim, str group) -> Tensor",
)


@exchange_op.register_fake
def _(x, kind, dim, group):
    shape, ranks = list(x.shape), _resolve_process_group(group).size()
    if kind == "gather":
        shape[dim] *= ranks
    elif kind == "shard":
        shape[dim] //= ranks
    return x.new_empty(shape)


def _setup_exchange(ctx, inputs, output):
    _, kind, *where = inputs
    ctx.options = (_INVERSE[kind], *where)


exchange_op.register_autograd(
    lambda ctx, grad: (exchange_op(grad, *ctx.options), None, None, None), setup_context=_setup_exchange
)


def _move(x: Tensor, group: dist.ProcessGroup, step: int) -> Tensor:
    """(B, 2, ...): ``x`` of the chunks ``step`` before this rank's two; 0 for chunks outside the sequence."""
    rank, ranks = group.rank(), group.size()
    last = 2 * ranks - 1
    chunks = own_chunks(rank, ranks)
    # Pairs (other rank, 0 or 1 for this rank's chunks), sorted by rank, the order of an all-to-all.
    sends = sorted((min(t, last - t), n) for n, c in enumerate(chunks) if 0 <= (t := c + step) <= last)
    takes = sorted((min(s, last - s), n) for n, c in enumerate(chunks) if 0 <= (s := c - step) <= last)
    sent = x.movedim(1, 0)[[n for _, n in sends]]
    sizes, counts = ([sum(n == r for n, _ in pairs) for r in range(ranks)] for pairs in (sends, takes))
    received = all_to_all(sent, sizes, counts, group)
    moved = torch.zeros_like(x)
    for (_, n), one in zip(takes, received, strict=True):
        moved[:, n] = one
    return moved


def join_shards(shards: Tensor) -> Tensor:
    """The sequence (L, ...) from the shards (P, T, ...) of all ranks."""
    early, late = shards.chunk(2, 1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(P, ...): ``x`` of every rank."""
    x = x.contiguous()
    gathered = x.new_empty((group.size() * len(x), *x.shape[1:]))
    with _one_line("all-gather"):
        _all_gather(_view_bytes(gathered), _view_bytes(x), group)
    return gathered.unflatten(0, (group.size(), -1))


def all_to_all(x: Tensor, sizes: list[int], counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """(sum of counts, ...): the data from each rank; ``sizes`` splits x (n, ...) among the receivers."""
    x = x.contiguous()
    received = x.new_empty((sum(counts), *x.shape[1:]))
    with _one_line("all-to-all"):
        dist.all_to_all_single(_view_bytes(received), _view_bytes(x), counts, sizes, group)
    return received


def _view_bytes(x: Tensor) -> Tensor:
    """A contiguous x (n, ...) as (n, bytes), because gloo does not support every dtype."""
    row = math.prod(x.shape[1:])
    return x.as_strided((len(x), row), (row, 1)).view(torch.uint8)  # dimensions of size 1 have any stride


@contextlib.contextmanager
def _one_line(collective: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"context_parallel: an {collective} failed, because another rank stopped or passed different "
            f"shapes; see the errors of the other ranks ({reason})"
        ) from error
