"""Forgetting attention of a sequence that is sharded over ranks (context parallelism).

For P ranks, the sequence is split into 2P equal chunks of whole blocks. Rank r owns chunks r and 2P - 1 - r,
an early and a late one, which balances the work ("zig-zag"). The boundary depends on the gates and delta, not
on the keys. After one all-gather of the gates, every rank can therefore compute the boundary of all chunks
and
the key blocks to send and receive: the boundary is non-decreasing along a head, so a chunk of queries reads a
suffix of the keys before it. One all-to-all exchanges the keys, and another one returns their gradients.

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
    return out, starts[:, :, list(plan.chunks)].flatten(2)


class Plan(NamedTuple):
    """The communication and computation of one call. A *row* is a key head of a sequence and its query heads.

    ``own`` and ``table`` index the key blocks of all rows that this rank owns or receives: first its own,
    then those of each rank. ``sent[r]`` contains the indices of own blocks that rank r reads, and
    ``received[r]`` is the number of blocks from rank r. Both ranks order them by row and block, so no size is
    exchanged.
    """

    call: AttentionCall
    group: Any
    backend: Backend
    chunks: tuple[int, int]
    grid: tuple[int, int]
    gates: Tensor  # (R, G, L)
    c: Tensor  # (R, G, L) float64
    boundary: Tensor  # (R, G, M) int32
    first: Tensor  # (R, 2P) int64 on the CPU: the first key block that each chunk of queries reads
    table: Tensor  # (R, N) int64 on the CPU: the index of each key block, or -1
    own: Tensor  # (R, N / P) int64 on the CPU: the indices of this rank's blocks
    sent: list[Tensor]
    received: list[int]


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
    first = boundary[:, :, :: tokens // 2 // block_q].amin(1).long().cpu()
    rows, blocks = len(first), tokens // 2 // block_k  # blocks of a chunk
    block = torch.arange(2 * ranks * blocks)
    chunk = block // blocks
    owner = chunk.minimum(2 * ranks - 1 - chunk)

    def find_reads(reader: int) -> Tensor:
        """(R, N) bool: the key blocks of other ranks that ``reader`` needs."""
        read = torch.zeros(rows, len(block), dtype=torch.bool)
        for own in own_chunks(reader, ranks):
            read |= (block >= first[:, own, None]) & (chunk < own)
        return read & (owner != reader)

    own = torch.arange(rows * 2 * blocks).view(rows, -1)
    table = torch.full((rows, len(block)), -1)
    table[:, owner == rank] = own
    reads = find_reads(rank)
    # Indices in the order of arrival: by sender, row and block.
    received, count = [], own.numel()
    for sender in range(ranks):
        arriving = reads & (owner == sender)
        received.append(int(arriving.sum()))
        table[arriving] = torch.arange(count, count + received[-1])
        count += received[-1]
    sent = [table[find_reads(reader) & (owner == rank)].to(call.q.device) for reader in range(ranks)]
    chunks = own_chunks(rank, ranks)
    return Plan(call, group, backend, chunks, grid, gates, c, boundary, first, table, own, sent, received)


class _LocalCall(NamedTuple):
    """One call of the backend: a chunk of queries of some rows, with all keys that these rows read."""

    rows: Tensor  # (g,) int64
    queries: slice
    blocks: Tensor  # (g, n) int64, the indices of the key blocks in the pool
    call: AttentionCall
    c: Tensor
    boundary: Tensor


def _local_calls(plan: Plan, q: Tensor, pool: Tensor) -> Iterator[_LocalCall]:
    """The calls of this rank. q is (R, G, T, D); pool is (2, n, block, D): key blocks and a zero block."""
    block_q, block_k = plan.grid
    size = q.shape[2] // 2
    for half, chunk in enumerate(plan.chunks):
        fetched = chunk * size // block_k - plan.first[:, chunk]
        # Rows of similar lengths share a call. Blocks before the first block of a row are never read.
        bucket = fetched.double().clamp(min=0.5).log2().ceil()
        for one in bucket.unique():
            chosen = (bucket == one).nonzero()[:, 0]
            base = int(plan.first[chosen, chunk].min())
            blocks = plan.table[chosen, base : (chunk + 1) * size // block_k].to(q.device)
            rows = chosen.to(q.device)
            k, v = pool[:, blocks].flatten(2, 3)[:, :, None]
            seq_start = plan.call.seq_start
            if seq_start is not None:
                seq_start = (seq_start[rows // plan.call.k.shape[1]] - base * block_k).clamp(min=0)
            keys = slice(base * block_k, (chunk + 1) * size)
            queries = slice(half * size, (half + 1) * size)
            tiles = slice(chunk * size // block_q, (chunk + 1) * size // block_q)
            call = plan.call._replace(
                q=q[rows][:, :, queries],
                k=k,
                v=v,
                log_fgate=plan.gates[rows][..., keys],
                threshold=None,
                seq_start=seq_start,
            )
            boundary = plan.boundary[rows][..., tiles] - base
            yield _LocalCall(rows, queries, blocks, call, plan.c[rows][..., keys].contiguous(), boundary)


class _AttendShards(torch.autograd.Function):
    """Exchanges keys, calls the backend, and returns the gradients of the keys to the ranks that own them."""

    @staticmethod
    def forward(ctx, q, k, v, log_fgate, plan: Plan):
        rows, tokens, head_dim = len(plan.first), q.shape[2], q.shape[3]
        blocks = (2, -1, plan.grid[1], head_dim)
        own = torch.stack((k, v)).reshape(blocks)
        sent = own[:, torch.cat(plan.sent)].movedim(1, 0)
        received = all_to_all(sent, list(map(len, plan.sent)), plan.received, plan.group)
        pool = torch.cat((own, received.movedim(1, 0), torch.zeros_like(own[:, :1])), 1)
        q_rows = q.reshape(rows, -1, tokens, head_dim)
        out, saved = torch.empty_like(q_rows), []
        with without_autocast(q):
            for one in _local_calls(plan, q_rows, pool):
                part, kept = plan.backend.attend(one.call, one.c, one.boundary)
                out[:, :, one.queries][one.rows] = part
                saved.append(kept)
        ctx.plan, ctx.shapes = plan, (q.shape, k.shape)
        ctx.save_for_backward(q_rows, pool, out, *saved)
        return out.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        plan = ctx.plan
        q, pool, out, *saved = ctx.saved_tensors
        dout, dq = dout.reshape(q.shape), torch.empty_like(q)
        block, head_dim = pool.shape[2:]
        # dk, dv and the gradient of the gates of each key, in float32 because they are summed over ranks.
        width = 2 * head_dim + q.shape[1]
        grads = torch.zeros(pool.shape[1], block, width, dtype=torch.float32, device=q.device)
        with without_autocast(q):
            for one, kept in zip(_local_calls(plan, q, pool), saved, strict=True):
                results = (out[:, :, one.queries][one.rows], kept, one.c, one.boundary)
                given = dout[:, :, one.queries][one.rows]
                dq_part, dk, dv, dgates = plan.backend.partial_gradients(given, one.call, *results)
                dq[:, :, one.queries][one.rows] = dq_part.to(q.dtype)
                parts = torch.cat((dk[:, 0], dv[:, 0], dgates.mT), -1)
                # Only the index of the zero block occurs twice, so the order of the sums is fixed.
                grads.index_add_(0, one.blocks.flatten() % len(grads), parts.reshape(-1, block, width))
        own = plan.own.numel()
        returned = all_to_all(
            grads[own : own + sum(plan.received)], plan.received, list(map(len, plan.sent)), plan.group
        )
        for numbers, part in zip(plan.sent, returned.split(list(map(len, plan.sent))), strict=True):
            grads.index_add_(0, numbers, part)
        sizes = (head_dim, head_dim, q.shape[1])
        dk, dv, dgates = grads[:own].view(len(q), -1, width).split(sizes, -1)
        q_shape, k_shape = ctx.shapes
        dk, dv = (x.reshape(k_shape).to(q.dtype) for x in (dk, dv))
        return dq.view(q_shape), dk, dv, dgates.mT.reshape(q_shape[:3]), None


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
        dist.all_gather([*_view_bytes(gathered).chunk(group.size())], _view_bytes(x), group)
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
