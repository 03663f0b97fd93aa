"""Forgetting attention of a sequence that is sharded over ranks (context parallelism).

For P ranks, the sequence is split into 2P equal chunks of whole blocks. Rank r owns chunks r and 2P - 1 - r,
an early and a late one, which balances the work ("zig-zag"). The boundary depends on the gates and delta, not
on the keys. After one all-gather of the gates, every rank can therefore compute the boundary of all chunks
and the key blocks to send and receive: the boundary is non-decreasing along a head, so a chunk of queries
reads a suffix of the keys before it. One all-to-all exchanges the keys, and another one returns their
gradients.

The rows of dS sum to 0, so no query contributes to a gate before its first key. Each rank therefore computes
the gradient of the gates by suffix sums over its own range of keys, and returns the result with dk and dv.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from .backends import Backend, find_backend
from .checks import AttentionCall, check_gates, check_threshold, check_values
from .op import without_autocast
from .threshold import check_floor, join_norms, longest_norms

# These functions launch collectives with data-dependent sizes, which torch.compile cannot trace, so compiled
# code calls them eagerly. (`torch.compiler.disable` would import the compiler with this package.)
_not_compiled: Any = _disable_dynamo
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


@_not_compiled
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
    whole, part = _shard_functions(find_group(group), dim)
    return _Exchange.apply(x, part, whole)


@_not_compiled
def gather_sequence(x: Tensor, group: Any, dim: int = 1) -> Tensor:
    """The full tensor, on every rank, from the shards of :func:`shard_sequence`.

    Args:
        x: this rank's shard. group, dim: as in :func:`shard_sequence`.

    Returns:
        The tensor with ``ranks`` times the length of ``x``. Every rank must compute the same loss from it,
        because the gradient of ``x`` is this rank's shard of the gradient, not a sum over ranks.
    """
    whole, part = _shard_functions(find_group(group), dim)
    return _Exchange.apply(x, whole, part)


@_not_compiled
def previous_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, 2, ...): the token before each of this rank's two chunks of ``x`` (B, T, ...), 0 before the first.

    One all-to-all sends one token to each neighbour, and the backward pass returns the gradients.
    """
    chunks = x.unflatten(1, (2, -1))
    return _Exchange.apply(chunks[:, :, -1], lambda x: _move(x, group, 1), lambda x: _move(x, group, -1))


@_not_compiled
def bound_over_ranks(q: Tensor, k: Tensor, sm_scale: float, group: dist.ProcessGroup) -> Tensor:
    """:func:`.threshold.logit_bound_from_norms` (B, H) of the full q and k, by one maximum over ranks."""
    norms = torch.stack([longest_norms(x, q.shape[1]) for x in (q, k)])
    # All-gather, because an all-reduce with maximum may drop a NaN, and only one rank would then raise an
    # error.
    longest = all_gather(norms, group).amax(0)
    return join_norms(longest, q.shape[-1], sm_scale)


def check_shards(q: Tensor, k: Tensor, implementation: str) -> None:
    """Checks the heads-first shards of a call under context parallelism.

    Raises:
        ValueError: the backend does not support shards, or a chunk does not consist of whole blocks.
    """
    backend = find_backend(implementation)
    if backend.by_autograd:
        raise ValueError(
            f"context_parallel requires kernels that accept a precomputed boundary, and implementation="
            f"{implementation!r} has none; use 'auto' or 'blockwise'"
        )
    multiple = 2 * math.lcm(*backend.block_sizes(q.shape[3], q.dtype))
    if q.shape[2] != k.shape[2] or k.shape[2] % multiple:
        raise ValueError(
            "with context_parallel, each rank's q, k, v and log_fgate must have the same multiple of "
            f"{multiple} tokens (two chunks of whole blocks), got {q.shape[2]} queries, {k.shape[2]} keys; "
            "pad the sequence on the right, and decode without context_parallel"
        )


@_not_compiled
def attend_shards(call: AttentionCall, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """out (B, H, T, D) and boundary (B, H, M) of this rank's queries, in key blocks of the full sequence.

    Args:
        call: this rank's q, k, v and log_fgate; the other fields refer to the full sequence.
    """
    plan = make_plan(call, group)
    out = _AttendShards.apply(*call[:4], plan)
    starts = plan.boundary.view(*call.q.shape[:2], 2 * group.size(), -1)
    return out, torch.cat([starts[:, :, chunk] for chunk in plan.chunks], 2)


class Plan(NamedTuple):
    """The communication and computation of one call. A *row* is a key head of a sequence and its query heads.

    A rank has a *pool* of key blocks: its own in the order of rows, then those of each rank in the order of
    chunks and rows. The backend computes both halves of this rank's queries in one call, whose batch is
    (row, half). It reads *packed* keys: for each row and half the blocks of the pool that the half reads.
    """

    call: AttentionCall
    group: Any
    backend: Backend
    chunks: tuple[int, int]
    grid: tuple[int, int]
    gates: Tensor  # (R, G, L)
    c: Tensor  # (R, G, L) float64
    boundary: Tensor  # (R, G, M) int32
    sizes: list[int]  # blocks sent to each rank
    received: list[int]  # blocks from each rank
    packed: Tensor  # (2 R, 2) int64: see `Backend.attend`
    sent: Tensor  # (sum of sizes,) int64: the indices in the pool of the blocks to send
    blocks: Tensor  # (n,) int64: the index in the pool of each packed block
    places: Tensor  # (n,) int64: the index of each packed block among all key blocks of the backend's call


@torch.no_grad()
def make_plan(call: AttentionCall, group: dist.ProcessGroup) -> Plan:
    batch, heads, tokens, head_dim = call.q.shape
    rank, ranks, kv_heads = group.rank(), group.size(), call.k.shape[1]
    gates = join_shards(all_gather(call.log_fgate.movedim(2, 0), group)).movedim(0, 2).contiguous()
    check_gates(gates)
    check_threshold(call.threshold)
    check_values("seq_start", call.seq_start, 0, tokens * ranks - 1)
    backend = find_backend(call.implementation)
    check_floor(
        call._replace(log_fgate=gates),
        backend.least_clamped,
        lambda q, k, sm_scale: bound_over_ranks(q, k, sm_scale, group),
    )
    # The search reads only the shape of q.
    q = call.q[:, :, :1].expand(-1, -1, tokens * ranks, -1)
    c, boundary = backend.search(call._replace(q=q, log_fgate=gates))
    gates, c, boundary = (x.reshape(batch * kv_heads, heads // kv_heads, -1) for x in (gates, c, boundary))
    block_q, block_k = grid = backend.block_sizes(head_dim, call.q.dtype)
    # The only host synchronisation: message sizes must be known on the host.
    first = boundary[:, :, :: tokens // 2 // block_q].amin(1).cpu().long()
    sizes, received, *indices = _index_blocks(first, rank, tokens // 2 // block_k)
    indices[0] *= block_k
    flat = torch.cat([x.flatten() for x in indices])
    if call.q.is_cuda:
        flat = flat.pin_memory()
    parts = flat.to(call.q.device, non_blocking=True).split([x.numel() for x in indices])
    found = gates, c, boundary, sizes, received, parts[0].view(-1, 2)
    return Plan(call, group, backend, own_chunks(rank, ranks), grid, *found, *parts[1:])


def _index_blocks(first: Tensor, rank: int, blocks: int) -> tuple[Any, ...]:
    """The fields ``sizes`` to ``places`` of a plan; ``packed`` in blocks.

    Args:
        first: (R, 2P) int64 on the CPU: the first key block that each chunk of queries reads.
        blocks: the number of key blocks of a chunk.
    """
    rows, chunks = first.shape
    ranks = chunks // 2
    early, late = own_chunks(rank, ranks)
    own = slice(early, late + 1, late - early)  # a view of the two chunks of this rank
    chunk = torch.arange(chunks, device="cpu")
    # (R, 2P, 2P): how many blocks, the last ones, of each chunk of keys a chunk of queries reads.
    read = ((chunk + 1) * blocks - first[:, :, None]).clamp(0, blocks).tril()
    # (R, P, 2P): how many of them each rank reads, and how many it fetches from other ranks.
    fetched = torch.maximum(read[:, :ranks], read[:, ranks:].flip(1))
    fetched *= chunk.minimum(chunk.flip(0)) != chunk[:ranks, None]
    # (P, 2, R), the orders in which blocks leave and arrive: by rank, half and row.
    leaving = fetched[:, :, own].permute(1, 2, 0)
    arriving = torch.stack((fetched[:, rank, :ranks], fetched[:, rank, ranks:].flip(1)), 2).permute(1, 2, 0)
    # The ends in the pool of the own chunks (R, 2), and of the blocks of each chunk (2P, R).
    own_ends = torch.arange(blocks, (rows * 2 + 1) * blocks, blocks, device="cpu").view(rows, 2)
    ends = arriving.flatten().cumsum(0).view_as(arriving) + rows * 2 * blocks
    ends = torch.cat((ends[:, 0], ends[:, 1].flip(0)))
    ends[own] = own_ends.T
    reads = read[:, own]  # (R, 2, 2P), the order of the packed keys
    counts = reads.sum(-1)
    # Both halves of the queries end at the last key of the backend's call, so the early half's keys move.
    length = (late + 1) * blocks
    earliest = length - counts
    packed = counts.flatten().cumsum(0).view_as(counts) - length
    places = torch.arange(0, rows * 2 * length, length, device="cpu").view(rows, 2) + earliest
    return (
        leaving.sum((1, 2)).tolist(),
        arriving.sum((1, 2)).tolist(),
        torch.stack((packed, earliest), -1).flatten(0, 1),
        _join_ranges(own_ends.T - leaving, leaving),
        _join_ranges(ends.T[:, None] - reads, reads),
        _join_ranges(places, counts),
    )


def _join_ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """All integers of the ranges ``starts .. starts + counts``, one range after another."""
    starts, counts = starts.flatten(), counts.flatten()
    ends = counts.cumsum(0)
    return (starts - ends + counts).repeat_interleave(counts) + torch.arange(int(ends[-1]), device="cpu")


class _LocalCall(NamedTuple):
    """The arguments of the backend's call: both halves of this rank's queries, with packed keys."""

    call: AttentionCall
    c: Tensor
    boundary: Tensor
    packed: Tensor


def _local_call(plan: Plan, q: Tensor, pool: Tensor) -> _LocalCall:
    """The backend's call for q (B, H, T, D) and the pool (n, block, 2 D) of keys and values."""
    (early, late), size, kv_heads = plan.chunks, q.shape[2] // 2, plan.call.k.shape[1]
    shift, end = (late - early) * size, (late + 1) * size

    def align(x: Tensor) -> Tensor:
        """(2 R, G, end): ``x`` (R, G, L) for each half, such that both halves end at the last number."""
        aligned = x.new_zeros(len(x), 2, x.shape[1], end)
        aligned[:, 0, :, shift:] = x[..., : end - shift]
        aligned[:, 1] = x[..., :end]
        return aligned.flatten(0, 1)

    starts = plan.boundary.unflatten(2, (2 * plan.group.size(), -1))
    starts = torch.stack((starts[:, :, early] + shift // plan.grid[1], starts[:, :, late]), 1).flatten(0, 1)
    seq_start = plan.call.seq_start
    if seq_start is not None:
        seq_start = seq_start.repeat_interleave(kv_heads)
        seq_start = torch.stack((seq_start + shift, seq_start), 1).flatten()
    k, v = pool.index_select(0, plan.blocks).view(1, 1, -1, pool.shape[2]).chunk(2, -1)
    call = plan.call._replace(
        q=_split_halves(q, kv_heads),
        k=k,
        v=v,
        log_fgate=align(plan.gates),
        threshold=None,
        seq_start=seq_start,
    )
    return _LocalCall(call, align(plan.c), starts, plan.packed)


def _split_halves(x: Tensor, kv_heads: int) -> Tensor:
    """(2 R, G, T / 2, D) from x (B, H, T, D), without a copy if G is 1 and x is contiguous."""
    batch, heads, tokens, head_dim = x.shape
    x = x.reshape(batch * kv_heads, heads // kv_heads, 2, tokens // 2, head_dim)
    return x.transpose(1, 2).flatten(0, 1)


def _join_halves(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`_split_halves`; ``shape`` is (B, H, T, D)."""
    return x.unflatten(0, (-1, 2)).transpose(1, 2).reshape(shape)


class _AttendShards(torch.autograd.Function):
    """Exchanges keys, calls the backend, and returns the gradients of the keys to the ranks that own them."""

    @staticmethod
    def forward(ctx, q, k, v, log_fgate, plan: Plan):
        own = torch.cat((k, v), -1).reshape(-1, plan.grid[1], 2 * k.shape[3])
        received = all_to_all(own.index_select(0, plan.sent), plan.sizes, plan.received, plan.group)
        pool = torch.cat((own, received))
        with without_autocast(q):
            out, saved = plan.backend.attend(*_local_call(plan, q, pool))
        out = _join_halves(out, q.shape)
        ctx.plan = plan
        ctx.save_for_backward(q, pool, out, saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        plan = ctx.plan
        q, pool, out, saved = ctx.saved_tensors
        kv_heads = plan.call.k.shape[1]
        dout, halves = (_split_halves(x, kv_heads) for x in (dout, out))
        with without_autocast(q):
            call, *given = _local_call(plan, q, pool)
            dq, dk, dv, dgates = plan.backend.partial_gradients(dout, call, halves, saved, *given)
        # dk, dv and the gradient of the gates of each key, in float32 because they are summed over ranks.
        block, group = pool.shape[1], dgates.shape[1]
        dgates = dgates.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1).index_select(0, plan.places)
        dk, dv = (x.reshape(-1, block, q.shape[3]) for x in (dk, dv))
        parts = torch.cat((dk, dv, dgates.mT), -1)
        grads = parts.new_zeros(len(pool), *parts.shape[1:])
        # The halves are the only two that add to a block, and a sum of two numbers does not depend on order.
        grads.index_add_(0, plan.blocks, parts)
        own = len(grads) - sum(plan.received)
        returned = all_to_all(grads[own:], plan.received, plan.sizes, plan.group)
        for numbers, part in zip(plan.sent.split(plan.sizes), returned.split(plan.sizes), strict=True):
            grads.index_add_(0, numbers, part)
        widths = (q.shape[3], q.shape[3], group)
        dk, dv, dgates = grads[:own].view(len(q) * kv_heads, -1, sum(widths)).split(widths, -1)
        dk, dv = (x.reshape(len(q), kv_heads, *q.shape[2:]).to(q.dtype) for x in (dk, dv))
        return _join_halves(dq.to(q.dtype), q.shape), dk, dv, dgates.mT.reshape(q.shape[:3]), None


class _Exchange(torch.autograd.Function):
    """A linear exchange between ranks, and the exchange that returns the gradients."""

    @staticmethod
    def forward(ctx, x, send, send_back):
        ctx.send_back = send_back
        return send(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.send_back(grad), None, None


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


def _shard_functions(group: dist.ProcessGroup, dim: int) -> tuple[Callable, Callable]:
    """The function that returns the whole tensor of a shard along ``dim``, and its inverse."""

    def gather(x: Tensor) -> Tensor:
        return join_shards(all_gather(x.movedim(dim, 0), group)).movedim(0, dim)

    return gather, lambda x: _cut(x, group, dim)


def _cut(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    ranks, length = group.size(), x.shape[dim]
    if length % (2 * ranks):
        raise ValueError(
            f"the length of dimension {dim}, {length}, must be a multiple of twice the {ranks} ranks; pad "
            "the sequence on the right"
        )
    parts = x.chunk(2 * ranks, dim)
    return torch.cat([parts[n] for n in own_chunks(group.rank(), ranks)], dim)


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
