"""Forgetting attention of a sequence that is sharded over ranks (context parallelism).

For P ranks, the sequence is split into 2P equal chunks of whole blocks. Rank r owns chunks r and 2P - 1 - r,
an early and a late one, which balances the work ("zig-zag"). The boundary depends on the gates and delta, not
on the keys. After one all-gather of the gates, every rank can therefore compute the boundary of all chunks
and the key blocks to send and receive: the boundary is non-decreasing along a head, so a chunk of queries
reads a suffix of the keys before it. One all-to-all exchanges the keys, and another one returns their
gradients.

Collectives with data-dependent sizes cannot be traced. In compiled code the call and the exchanges are
therefore operators, which take the name of the process group; eager calls run the same functions directly.

The rows of dS sum to 0, so no query contributes to a gate before its first key. Each rank therefore computes
the gradient of the gates by suffix sums over its own range of keys, and returns the result with dk and dv.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.autograd.function import once_differentiable

from .backends import find_backend
from .checks import AttentionCall, check_gates, check_threshold, check_values
from .exchange import all_gather, all_to_all, exchange, join_shards, own_chunks
from .op import _needs_no_operator, without_autocast
from .threshold import check_floor, join_norms, longest_norms


def bound_over_ranks(q: Tensor, k: Tensor, sm_scale: float | None, group: dist.ProcessGroup) -> Tensor:
    """:func:`.threshold.logit_bound_from_norms` (B, H) of the full q and k, by one maximum over ranks."""
    norms = torch.stack([longest_norms(x, q.shape[1]) for x in (q, k)])
    # An all-reduce with maximum may drop a NaN, and only one rank would then raise an error. The norms of q
    # and of k are the two chunks of a rank, so in the gathered tensor all norms of q precede those of k.
    longest = exchange(norms, "gather", 0, group).unflatten(0, (2, -1)).amax(1)
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


def attend_shards(call: AttentionCall, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """out (B, H, T, D) and boundary (B, H, M) of this rank's queries, in key blocks of the full sequence.

    Args:
        call: this rank's q, k, v and log_fgate; the other fields refer to the full sequence.
    """
    if _needs_no_operator(call[:6]):
        out, boundary = _AttendShards.apply(*call, group)
    else:
        out, *_, boundary, _, _ = attend_shards_op(*call, group.group_name)
    starts = boundary.view(*call.q.shape[:2], 2 * group.size(), -1)
    return out, torch.cat([starts[:, :, chunk] for chunk in own_chunks(group.rank(), group.size())], 2)


class Plan(NamedTuple):
    """The communication and computation of one call. A *row* is a key head of a sequence and its query heads.

    A rank has a *pool* of key blocks: its own in the order of rows, then those of each rank in the order of
    chunks and rows. The backend computes both halves of this rank's queries in one call, whose batch is
    (row, half). It reads *packed* keys: for each row and half the blocks of the pool that the half reads.
    """

    gates: Tensor  # (R, G, L)
    c: Tensor  # (R, G, L) float64
    boundary: Tensor  # (R, G, M) int32
    sizes: Tensor  # (2, P) int64 on the CPU: the numbers of blocks sent to each rank, and received from each
    indices: Tensor  # (n,) int64: the results of `split_indices`, one after another

    def split_indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four parts of ``indices``.

        Returns:
            packed (2 R, 2), see :meth:`.backends.Backend.attend`; sent, the indices in the pool of the blocks
            to send; blocks and places, the indices of each packed block in the pool and among all key blocks
            of the backend's call.
        """
        ends, leaving = 4 * len(self.gates), sum(self.sizes[0].tolist())
        read = (len(self.indices) - ends - leaving) // 2
        packed, sent, blocks, places = self.indices.split((ends, leaving, read, read))
        return packed.view(-1, 2), sent, blocks, places


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
    block_q, block_k = backend.block_sizes(head_dim, call.q.dtype)
    # The only host synchronisation: message sizes must be known on the host.
    first = boundary[:, :, :: tokens // 2 // block_q].amin(1).cpu().long()
    sizes, packed, *others = _index_blocks(first, rank, tokens // 2 // block_k)
    indices = torch.cat([x.flatten() for x in (packed * block_k, *others)])
    if call.q.is_cuda:
        indices = indices.pin_memory()
    return Plan(gates, c, boundary, sizes, indices.to(call.q.device, non_blocking=True))


def _index_blocks(first: Tensor, rank: int, blocks: int) -> tuple[Tensor, ...]:
    """``sizes`` and the indices of a plan, on the CPU; ``packed`` in blocks.

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
        torch.stack((leaving, arriving)).sum((2, 3)),
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


def _local_call(call: AttentionCall, pool: Tensor, plan: Plan, group: dist.ProcessGroup) -> _LocalCall:
    """The backend's call for q (B, H, T, D) and the pool (n, block, 2 D) of keys and values."""
    ranks = group.size()
    early, late = own_chunks(group.rank(), ranks)
    size, kv_heads = call.q.shape[2] // 2, len(plan.gates) // len(call.q)
    shift, end = (late - early) * size, (late + 1) * size

    def align(x: Tensor) -> Tensor:
        """(2 R, G, end): ``x`` (R, G, L) for each half, such that both halves end at the last number."""
        aligned = x.new_zeros(len(x), 2, x.shape[1], end)
        aligned[:, 0, :, shift:] = x[..., : end - shift]
        aligned[:, 1] = x[..., :end]
        return aligned.flatten(0, 1)

    starts = plan.boundary.unflatten(2, (2 * ranks, -1))
    starts = torch.stack((starts[:, :, early] + shift // pool.shape[1], starts[:, :, late]), 1).flatten(0, 1)
    seq_start = call.seq_start
    if seq_start is not None:
        seq_start = seq_start.repeat_interleave(kv_heads)
        seq_start = torch.stack((seq_start + shift, seq_start), 1).flatten()
    packed, _, blocks, _ = plan.split_indices()
    k, v = pool.index_select(0, blocks).view(1, 1, -1, pool.shape[2]).chunk(2, -1)
    call = call._replace(
        q=_split_halves(call.q, kv_heads),
        k=k,
        v=v,
        log_fgate=align(plan.gates),
        threshold=None,
        seq_start=seq_start,
    )
    return _LocalCall(call, align(plan.c), starts, packed)


def _split_halves(x: Tensor, kv_heads: int) -> Tensor:
    """(2 R, G, T / 2, D) from x (B, H, T, D), without a copy if G is 1 and x is contiguous."""
    batch, heads, tokens, head_dim = x.shape
    x = x.reshape(batch * kv_heads, heads // kv_heads, 2, tokens // 2, head_dim)
    return x.transpose(1, 2).flatten(0, 1)


def _join_halves(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`_split_halves`; ``shape`` is (B, H, T, D)."""
    return x.unflatten(0, (-1, 2)).transpose(1, 2).reshape(shape)


def _run_forward(*arguments) -> tuple[Tensor, ...]:
    """Exchanges keys and calls the backend, for the fields of an :class:`AttentionCall` and the group.

    Returns:
        out (B, H, T, D), the tensor that the backend saves, the pool and the plan.
    """
    call, group = AttentionCall(*arguments[:-1]), arguments[-1]
    plan, backend = make_plan(call, group), find_backend(call.implementation)
    head_dim = call.q.shape[3]
    block = backend.block_sizes(head_dim, call.q.dtype)[1]
    own = torch.cat((call.k, call.v), -1).reshape(-1, block, 2 * head_dim)
    _, sent, _, _ = plan.split_indices()
    sizes, received = plan.sizes.tolist()
    pool = torch.cat((own, all_to_all(own.index_select(0, sent), sizes, received, group)))
    with without_autocast(call.q):
        out, saved = backend.attend(*_local_call(call, pool, plan, group))
    return _join_halves(out, call.q.shape), saved, pool, *plan


def _run_backward(dout, q, out, saved, pool, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k, v and log_fgate, and returns those of keys to the ranks that own them.

    The arguments are the results of :func:`_run_forward` and the fields of a call from seq_start on.
    """
    *fields, seq_start, sm_scale, implementation, window_size, group = arguments
    plan, backend = Plan(*fields), find_backend(implementation)
    kv_heads, heads = len(plan.gates) // len(q), plan.gates.shape[1]
    halves, dhalves = (_split_halves(x, kv_heads) for x in (out, dout))
    call = AttentionCall(q, pool, pool, plan.gates, None, seq_start, sm_scale, implementation, window_size)
    with without_autocast(q):
        call, *given = _local_call(call, pool, plan, group)
        dq, dk, dv, dgates = backend.partial_gradients(dhalves, call, halves, saved, *given)
    # dk, dv and the gradient of the gates of each key, in float32 because they are summed over ranks.
    _, sent, blocks, places = plan.split_indices()
    block = pool.shape[1]
    dgates = dgates.unflatten(2, (-1, block)).transpose(1, 2).flatten(0, 1).index_select(0, places)
    dk, dv = (x.reshape(-1, block, q.shape[3]) for x in (dk, dv))
    parts = torch.cat((dk, dv, dgates.mT), -1)
    grads = parts.new_zeros(len(pool), *parts.shape[1:])
    # The halves are the only two that add to a block, and a sum of two numbers does not depend on order.
    grads.index_add_(0, blocks, parts)
    sizes, received = plan.sizes.tolist()
    own = len(grads) - sum(received)
    returned = all_to_all(grads[own:], received, sizes, group)
    for numbers, part in zip(sent.split(sizes), returned.split(sizes), strict=True):
        grads.index_add_(0, numbers, part)
    widths = (q.shape[3], q.shape[3], heads)
    dk, dv, dgates = grads[:own].view(len(plan.gates), -1, sum(widths)).split(widths, -1)
    dk, dv = (x.reshape(len(q), kv_heads, *q.shape[2:]).to(q.dtype) for x in (dk, dv))
    return _join_halves(dq.to(q.dtype), q.shape), dk, dv, dgates.mT.reshape(q.shape[:3])


def _setup_context(ctx, inputs, output):
    q, _, _, _, _, seq_start, *ctx.options = inputs
    ctx.save_for_backward(q, *output, seq_start)


class _AttendShards(torch.autograd.Function):
    """The two passes without operators: out and the boundary (R, G, M)."""

    @staticmethod
    def forward(ctx, *arguments):
        outputs = _run_forward(*arguments)
        _setup_context(ctx, arguments, outputs)
        boundary = outputs[5]
        ctx.mark_non_differentiable(boundary)
        return outputs[0], boundary

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        return *_run_backward(dout, *ctx.saved_tensors, *ctx.options), *[None] * 6


# A CUDA graph would replay the message sizes of the call that was captured.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_OPTIONS = "Tensor? seq_start, float sm_scale, str implementation, SymInt? window_size, str group"
attend_shards_op = torch.library.custom_op(
    "acp_repro::attend_shards",
    lambda *arguments: _run_forward(*arguments[:-1], _resolve_process_group(arguments[-1])),
    mutates_args=(),
    tags=_TAGS,
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor log_fgate, Tensor? threshold, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
attend_shards_backward_op = torch.library.custom_op(
    "acp_repro::attend_shards_backward",
    lambda *arguments: _keep_apart(_run_backward(*arguments[:-1], _resolve_process_group(arguments[-1]))),
    mutates_args=(),
    tags=_TAGS,
    schema="(Tensor dout, Tensor q, Tensor out, Tensor saved, Tensor pool, Tensor gates, Tensor c, "
    f"Tensor boundary, Tensor sizes, Tensor indices, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _keep_apart(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``grads`` in separate memory, as the results of an operator must be; only dq is never a view."""
    dq, *others = grads
    return dq, *(x.contiguous() for x in others)


@attend_shards_op.register_fake
def _(q, k, v, log_fgate, threshold, seq_start, sm_scale, implementation, window_size, group):
    backend, context = find_backend(implementation), torch.library.get_ctx()
    batch, heads, tokens, head_dim = q.shape
    rows, ranks = batch * k.shape[1], _resolve_process_group(group).size()
    block_q, block_k = backend.block_sizes(head_dim, q.dtype)
    gates = log_fgate.new_empty(rows, heads // k.shape[1], tokens * ranks)
    halves = _split_halves(q, k.shape[1])
    return (
        _join_halves(torch.empty_like(halves), q.shape),
        q.new_empty(backend.saved_shape(halves), dtype=torch.float32),
        q.new_empty(context.new_dynamic_size(), block_k, 2 * head_dim),
        gates,
        torch.empty_like(gates, dtype=torch.float64),
        gates.new_empty(*gates.shape[:2], gates.shape[2] // block_q, dtype=torch.int32),
        torch.empty(2, ranks, dtype=torch.int64, device="cpu"),
        q.new_empty(context.new_dynamic_size(), dtype=torch.int64),
    )


@attend_shards_backward_op.register_fake
def _(dout, q, out, saved, pool, gates, *_):
    dq = _join_halves(torch.empty_like(_split_halves(q, len(gates) // len(q))), q.shape)
    dk, dv = (q.new_empty(len(q), len(gates) // len(q), *q.shape[2:]) for _ in "kv")
    return dq, dk, dv, gates.new_empty(q.shape[:3])


def _backward(ctx, dout, *_):
    return *attend_shards_backward_op(dout, *ctx.saved_tensors, *ctx.options), *[None] * 6


attend_shards_op.register_autograd(_backward, setup_context=_setup_context)
