"""Context parallelism: time and bytes of our exchange, of an all-gather and of a ring of all keys.

All three compute the same blocks with the same kernels, and differ in the keys that they exchange. The
all-gather sends all keys and gates to every rank, and a reduce-scatter returns the gradients. The ring sends
shards from rank to rank until every rank has received all of them, and in the backward pass once more with
their gradients. Communication does not overlap with computation.
"""

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from acp_repro.pipeline.paper import samples, with_columns

from ...attention import choose_implementation, forgetting_attention, pruning_grid, shard_sequence
from ...attention.checks import AttentionCall
from ...attention.context_parallel import make_plan
from ...attention.exchange import all_gather, all_to_all, join_shards, own_chunks
from .attention import Problem
from .timing import ORDER, in_columns, interleaved, wall_ms

EXCHANGES = ("suffixes", "all-gather", "ring")
METHODS = ("acp", "exact")


@with_columns(
    "implementation",
    "exchange",
    "method",
    "gates",
    "length_tokens",
    "heads",
    "head_dim",
    "ranks",
    "repeats",
    "order",
    "pruned_ratio",
    *samples("forward_ms"),
    *samples("forward_backward_ms"),
    "gates_bytes",
    "forward_bytes",
    "backward_bytes",
    "most_received_bytes",
    "difference",
)
def time_exchanges(
    problem: Problem, gates: str, group: dist.ProcessGroup, repeats: int
) -> list[dict[str, Any]]:
    """One record for each exchange and method, on every rank. Times are those of the slowest rank.

    ``difference`` is the largest relative difference of the output and gradients from our exchange.
    Bytes are sums over ranks, except ``most_received_bytes``, the most that one rank receives in a forward.
    """
    device, dim = problem.q.device, 2
    shards = [shard_sequence(x, group, dim) for x in (*problem.inputs, problem.dout)]
    leaves = [x.detach().requires_grad_() for x in shards[:4]]

    def forward(method: str, exchange: str) -> Tensor:
        return attend(*leaves, problem.threshold_of(method), group, exchange)

    def both(method: str, exchange: str) -> tuple[Tensor, ...]:
        out = forward(method, exchange)
        return out, *torch.autograd.grad(out, leaves, shards[4])

    results, calls, records = {}, {}, []
    for method, exchange in itertools.product(METHODS, EXCHANGES):
        results[exchange, method] = [x.detach() for x in both(method, exchange)]
        for work in (forward, both):
            calls[exchange, method, work] = functools.partial(work, method, exchange)
    times = interleaved(calls, device, repeats, wall_ms)
    for exchange, method in results:
        pairs = zip(results[exchange, method], results["suffixes", method], strict=True)
        difference = max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)
        forward_ms, both_ms = (_slowest(times[exchange, method, work], device) for work in (forward, both))
        records.append(
            {
                "implementation": choose_implementation(device),
                "exchange": exchange,
                "method": method,
                "gates": gates,
                "length_tokens": problem.q.shape[dim],
                "heads": problem.q.shape[1],
                "head_dim": problem.q.shape[3],
                "ranks": group.size(),
                "repeats": len(forward_ms),
                "order": ORDER,
                "pruned_ratio": problem.pruned_ratio(method),
                **in_columns(forward=forward_ms, forward_backward=both_ms),
                **count_bytes(leaves, problem.threshold_of(method), group, exchange),
                "difference": max(_slowest([difference], device)),
            }
        )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """One line per record, with bytes also as percentages of the all-gather's."""
    whole = {(r["length_tokens"], r["method"]): r for r in records if r["exchange"] == "all-gather"}
    row = "{:>8} {:<6}{:<11}{:>9}{:>9}{:>13}{:>8}{:>13}{:>8}"
    lines = [row.format("tokens", "", "", "f ms", "f+b ms", "f MB", "", "b MB", "")]
    for r in records:
        of = whole[r["length_tokens"], r["method"]]
        numbers = [f"{r['forward_ms']:.2f}", f"{r['forward_backward_ms']:.2f}"]
        for part in ("forward_bytes", "backward_bytes"):
            numbers += [f"{r[part] / 1e6:.2f}", f"{r[part] / of[part]:.1%}"]
        lines.append(row.format(r["length_tokens"], r["method"], r["exchange"], *numbers))
    return "\n".join(lines)


def attend(q, k, v, log_fgate, threshold, group: dist.ProcessGroup, exchange: str) -> Tensor:
    """Forgetting attention (B, H, T, D) of this rank's shards, with one of :data:`EXCHANGES`."""
    options: dict[str, Any] = {"head_first": True, "adaptive_threshold": threshold}
    if exchange == "suffixes":
        return forgetting_attention(q, k, v, log_fgate, context_parallel=group, **options)
    k, v = _AllShards.apply(torch.stack((k, v)), 3, group, exchange == "ring")
    log_fgate = _AllShards.apply(log_fgate, 2, group, exchange == "ring")
    parts = []
    for queries, chunk in zip(q.chunk(2, 2), own_chunks(group.rank(), group.size()), strict=True):
        end = (chunk + 1) * queries.shape[2]
        keys = (k[:, :, :end], v[:, :, :end], log_fgate[:, :, :end])
        parts.append(forgetting_attention(queries, *keys, **options))
    return torch.cat(parts, 2)


def count_bytes(leaves: list[Tensor], threshold, group: dist.ProcessGroup, exchange: str) -> dict[str, int]:
    """The bytes that all ranks send to others: gates, keys and values in the forward pass, and all data in
    the backward pass; also the most that one rank receives in the forward pass, including gates."""
    q, k, v, log_fgate = (x.detach() for x in leaves)
    others, key_bytes = group.size() - 1, (k.numel() + v.numel()) * k.element_size()
    gates = others * log_fgate.numel() * 4
    gradients = (k.numel() + v.numel() + log_fgate.numel()) * 4
    if exchange == "suffixes":
        name = choose_implementation(q.device)
        plan = make_plan(AttentionCall(q, k, v, log_fgate, threshold, None, q.shape[3] ** -0.5, name), group)
        rows = int(plan.sizes[1].sum()) * pruning_grid(name, q.shape[3], q.dtype)[1]  # rows of keys
        forward = rows * 2 * q.shape[3] * k.element_size()
        backward = rows * (2 * q.shape[3] + q.shape[1] // k.shape[1]) * 4
    else:
        forward, backward = others * key_bytes, others * gradients
        if exchange == "ring":
            backward += others * key_bytes + gates  # shards are sent once more, with their gradients
    numbers = torch.tensor([gates, forward, backward], device=q.device)
    total, most = numbers.clone(), (numbers[0] + numbers[1]).clone()
    dist.all_reduce(total, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    names = ("gates_bytes", "forward_bytes", "backward_bytes")
    return dict(zip(names, total.tolist(), strict=True)) | {"most_received_bytes": int(most)}


class _AllShards(torch.autograd.Function):
    """Gathers a sharded tensor on every rank; gradients are summed over ranks in float32."""

    @staticmethod
    def forward(ctx, x, dim, group, ring):
        ctx.arguments = dim, group, ring
        x = x.movedim(dim, 0).contiguous()
        ctx.save_for_backward(x)
        if not ring:
            return join_shards(all_gather(x, group)).movedim(0, dim)
        shards = [x] * group.size()
        for hop in range(1, group.size()):
            shards[group.rank() - hop] = _send_on(shards[group.rank() - hop + 1], group)
        return join_shards(torch.stack(shards)).movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        dim, group, ring = ctx.arguments
        (x,) = ctx.saved_tensors
        rank, ranks = group.rank(), group.size()
        early, late = grad.movedim(dim, 0).float().unflatten(0, (2 * ranks, -1)).chunk(2)
        shards = torch.cat((early, late.flip(0)), 1)  # (P, T, ...)
        if not ring:
            size = [shards.shape[1]] * ranks
            total = all_to_all(shards.flatten(0, 1), size, size, group).unflatten(0, (ranks, -1)).sum(0)
        else:
            total = shards[rank - 1]
            for hop in range(2, ranks + 1):
                x = _send_on(x, group)
                total = _send_on(total, group) + shards[(rank - hop) % ranks]
        return total.to(grad.dtype).movedim(0, dim), None, None, None


def _send_on(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends ``x`` to the next rank and returns the tensor ``x`` of the previous rank."""
    rank, ranks = group.rank(), group.size()
    sizes, counts = ([len(x) * (r == one % ranks) for r in range(ranks)] for one in (rank + 1, rank - 1))
    return all_to_all(x, sizes, counts, group)


def _slowest(values: list[float], device: torch.device) -> list[float]:
    """The maximum of each value over ranks."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()
