"""Forgetting attention that skips pruned blocks on a CPU: forward and backward in plain PyTorch.

A *task* is one query block of one head with its range of keys, from the boundary to the block's last query.
Tasks with ranges of equal width are stacked and run as one batched matrix product, independent of their heads
and positions. A local head yields one large stack; a global head adds one task to each width. The number of
Python iterations therefore grows with the number of distinct widths, not with the number of blocks. Every
range ends at the block's last query, so all tasks share one triangular mask.

The softmax of Equation 2 is invariant to a constant per row. Therefore only ``-c_j`` (relative to the task's
first query) is added to the scores, inside the matrix product. If c falls too far within a query block, as at
a gate of 0, float32 would lose digits of ``-c_j``; such tasks add ``c_i - c_j`` instead.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .boundary import window_start
from .checks import AttentionCall
from .decay import MOST_ACROSS_FLOOR, count_closed_gates
from .kvcache import PagedKVCache
from .threshold import logit_bound_from_norms

# Scores in memory at once, in elements: about as many float32 as fit into the level-2 caches of two cores.
_CHUNK_ELEMENTS = 1 << 19
# If c falls by more than this many nats within a query block, each decay is computed in float64.
_STEEP = 128.0


class _Chunk(NamedTuple):
    """Indices and decay biases of a stack of tasks of equal width."""

    rows: Tensor  # (G, block_q) rows of the flat query tensor
    keys: Tensor  # (G, width) rows of the flat key tensor
    gates: Tensor  # (G, width) the same positions in the flat c, which has the heads of q
    bias: Tensor  # (G, 1 or block_q, width) -c_j relative to the task's first query or each; -inf for padding
    dead: Tensor | None  # (G, block_q, 1) rows before seq_start


class _Problem:
    """Inputs flattened over batch and heads, padded to whole query blocks, and split into chunks."""

    def __init__(self, call: AttentionCall, c, boundary, block_q, block_k, packed):
        q, k, v, log_fgate, _, seq_start, self.sm_scale, _, self.window_size = call
        heads, seqlen_q, seqlen_k = q.shape[1], q.shape[2], c.shape[2]
        self.shared = heads // k.shape[1]  # query heads per head of keys and values
        self.block_q = block_q
        self.compute_dtype = torch.promote_types(q.dtype, torch.float32)
        num_blocks = boundary.shape[-1]
        self.padding = num_blocks * block_q - seqlen_q
        self.q, self.k, self.v = (self.flatten(x) for x in (q, k, v))
        self.c, self.closed = (
            torch.nn.functional.pad(x.flatten(0, 1), (0, self.padding), mode="replicate")
            for x in (c, count_closed_gates(log_fgate))
        )
        # For smaller score differences, the clamped c already hides all keys before a gate of 0, at less
        # cost.
        self.masks_closed = bool(self.closed.any()) and self._may_cross_floor(q, k)
        self.length_q, self.length_k = seqlen_q + self.padding, seqlen_k + self.padding
        # The row of the flat k at which key 0 of each key head is, or would be.
        self.origin = torch.arange(len(q) * k.shape[1], device=q.device) * self.length_k
        if packed is not None:
            self.origin = packed[:, 0]
        self.first = torch.arange(num_blocks, device=q.device) * block_q + (seqlen_k - seqlen_q)
        self.start = boundary.flatten(0, 1).long() * block_k  # (BH, M)
        self.width = self.first + block_q - self.start
        last = (self.first + (block_q - 1)).clamp(max=self.c.shape[1] - 1)
        self.steep = self.c[:, self.first] - self.c[:, last] > _STEEP  # (BH, M)
        self.seq_start = None if seq_start is None else seq_start.repeat_interleave(heads)
        hidden = torch.full((block_q, block_q), float("-inf"), dtype=self.compute_dtype, device=q.device)
        self.mask = hidden.triu_(1)

    def _may_cross_floor(self, q: Tensor, k: Tensor) -> bool:
        """Whether scores may differ by more than the decay of a clamped gate, for any rows of q and k."""
        bound = logit_bound_from_norms(q.flatten(0, 1)[None], k.flatten(0, 1)[None], self.sm_scale)
        return bool((2 * bound > MOST_ACROSS_FLOOR).any())

    def flatten(self, x: Tensor) -> Tensor:
        """(B, H, T, D) as (B*H*(T + padding), D), contiguous, in the compute dtype."""
        x = x.to(self.compute_dtype)
        if self.padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, self.padding))
        return x.reshape(-1, x.shape[-1])

    def unflatten(self, flat: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`flatten`, in the shape, dtype and memory layout of ``like``."""
        batch, heads, length, head_dim = like.shape
        return torch.empty_like(like).copy_(flat.view(batch, heads, -1, head_dim)[:, :, :length])

    def chunks(self) -> Iterator[_Chunk]:
        """Tasks sorted by width, and split so that the scores of one chunk fit into the CPU's caches."""
        # Steep tasks have separate stacks, because in a common stack they would change the rounding of the
        # others.
        kind = self.width.flatten() * 2 + self.steep.flatten()
        order = kind.argsort(stable=True)
        kinds, counts = kind[order].unique_consecutive(return_counts=True)
        blocks = self.width.shape[1]
        position = 0
        in_block = torch.arange(self.block_q, device=kind.device)
        for one_kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            one_width, steep = divmod(one_kind, 2)
            size = max(1, _CHUNK_ELEMENTS // (one_width * self.block_q))
            in_window = torch.arange(one_width, device=kind.device)
            for tasks in order[position : position + count].split(size):
                head, block = tasks // blocks, tasks % blocks
                rows = (head * self.length_q + block * self.block_q)[:, None] + in_block
                start = self.start.flatten()[tasks]
                gates = (head * self.length_k + start)[:, None] + in_window
                keys = (self.origin[head // self.shared] + start)[:, None] + in_window
                base = (head * self.length_k + self.first[block])[:, None]
                if steep:
                    base = base + in_block
                bias = self.c.flatten()[base][..., None] - self.c.flatten()[gates][:, None]
                bias = bias.to(self.compute_dtype)
                if self.masks_closed:
                    past = self.closed.flatten()[gates][:, None] < self.closed.flatten()[base][..., None]
                    bias = bias.masked_fill(past, float("-inf"))
                dead = None
                if self.seq_start is not None:
                    limit = self.seq_start[head][:, None]
                    before = start[:, None] + in_window < limit
                    bias = bias.masked_fill(before[:, None], float("-inf"))
                    dead = (self.first[block][:, None] + in_block < limit)[..., None]
                yield _Chunk(rows, keys, gates, bias, dead)
            position += count

    def weights(self, q: Tensor, k: Tensor, chunk: _Chunk) -> Tensor:
        """(G, block_q, width) softmax weights of one chunk."""
        scores = torch.baddbmm(chunk.bias, q, k.mT, alpha=self.sm_scale)
        scores[..., -self.block_q :] += self.mask
        hidden = self.before_window(scores.shape[-1])
        if hidden is not None:
            scores[..., : hidden.shape[-1]].masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        if chunk.dead is not None:
            weights.masked_fill_(chunk.dead, 0.0)
        return weights

    def before_window(self, width: int) -> Tensor | None:
        """(block_q, n) bool: True for those of a task's first n keys that are before the query's window."""
        # All tasks of one width share the result, because their last key is at their last query.
        if self.window_size is None or width <= self.window_size:
            return None
        rows = torch.arange(width - self.block_q, width, device=self.mask.device)
        first = window_start(rows, self.window_size)
        return torch.arange(width - self.window_size, device=rows.device) < first[:, None]


def forward(
    call: AttentionCall, c: Tensor, boundary: Tensor, block_q: int, block_k: int, packed: Tensor | None = None
) -> Tensor:
    """Equation 3 at block level: (B, H, Tq, D) like q.

    Args:
        c: (B, H, Tk) float64. boundary: (B, H, M) int32. packed: see :meth:`.backends.Backend.attend`.
    """
    problem = _Problem(call, c, boundary, block_q, block_k, packed)
    out = torch.empty_like(problem.q)
    for chunk in problem.chunks():
        weights = problem.weights(problem.q[chunk.rows], problem.k[chunk.keys], chunk)
        out[chunk.rows] = weights @ problem.v[chunk.keys]
    return problem.unflatten(out, call.q)


def backward(
    dout: Tensor,
    call: AttentionCall,
    c: Tensor,
    boundary: Tensor,
    block_q: int,
    block_k: int,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward` with respect to q, k, v and c; the arguments are documented there.

    ``dS = P (dP - delta)``, with delta computed from P and dP. The row sums of dS therefore vanish up to
    rounding, and row and column sums use the same entries.

    Returns:
        dq, dk, dv like q, k, v, and dc (B, H, Tk) in the compute dtype.
    """
    problem = _Problem(call, c, boundary, block_q, block_k, packed)
    dout = problem.flatten(dout)
    dq, dk, dv = (torch.zeros_like(x) for x in (problem.q, problem.k, problem.v))
    dc = torch.zeros(problem.c.numel(), dtype=dk.dtype, device=dk.device)
    for chunk in problem.chunks():
        q_rows, k_rows = problem.q[chunk.rows], problem.k[chunk.keys]
        dout_rows, keys = dout[chunk.rows], chunk.keys.flatten()
        weights = problem.weights(q_rows, k_rows, chunk)
        dweights = dout_rows @ problem.v[chunk.keys].mT
        dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
        dv.index_add_(0, keys, (weights.mT @ dout_rows).flatten(0, 1))
        dk.index_add_(0, keys, (dscores.mT @ q_rows).flatten(0, 1), alpha=call.sm_scale)
        dq[chunk.rows] = (dscores @ k_rows).mul_(call.sm_scale)
        dc.index_add_(0, chunk.gates.flatten(), dscores.sum(1).flatten(), alpha=-1.0)
        dc.index_add_(0, chunk.gates[:, -block_q:].flatten(), dscores.sum(2).flatten())
    dc = dc.view(*c.shape[:2], -1)[..., : c.shape[-1]]
    dq, dk, dv = map(problem.unflatten, (dq, dk, dv), call[:3])
    return dq, dk, dv, dc


def decode(q: Tensor, cache: PagedKVCache, start_block, seq_start, sm_scale, window_size) -> Tensor:
    """Attention of one or a few query tokens (B, H, T, D) over the kept blocks of each head (Appendix F).

    Heads with the same number of kept blocks are computed in one batch. The result is like q.
    """
    batch, kv_heads, _ = cache.block_table.shape
    size, seqlen_q = cache.block_size, q.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_rows = q.to(dtype).reshape(batch * kv_heads, -1, seqlen_q, q.shape[3])  # (BHkv, G, T, D)
    starts = start_block.long().view(batch * kv_heads, -1)
    first = starts.amin(-1)
    lengths = cache.seqlens.long().repeat_interleave(kv_heads)
    widths = -(-lengths // size) - first
    positions = cache.positions(seqlen_q).repeat_interleave(kv_heads, 0)
    c_rows = cache.c_at(cache.positions(seqlen_q)).view(*q_rows.shape[:3])
    earliest = None if seq_start is None else seq_start.repeat_interleave(kv_heads)
    table = cache.block_table.flatten(0, 1).long()
    out = torch.empty_like(q_rows)
    for width in widths.unique().tolist():
        tasks = (widths == width).nonzero()[:, 0]
        blocks = table[tasks[:, None], first[tasks][:, None] + torch.arange(width, device=q.device)]
        keys = (first[tasks] * size)[:, None] + torch.arange(width * size, device=q.device)
        dead = keys >= lengths[tasks][:, None]  # not written yet
        if earliest is not None:
            dead |= keys < earliest[tasks][:, None]
        k, v = (x[blocks].flatten(1, 2).to(dtype) for x in (cache.k, cache.v))
        edge = slice(None if earliest is not None else -size, None)
        for x in (k, v):
            x[:, edge].masked_fill_(dead[:, edge, None], 0.0)
        c = cache.c[blocks].transpose(1, 2).flatten(2)  # (n, G, keys)
        bias = (c_rows[tasks][..., None] - c[:, :, None]).to(dtype)
        hidden = dead[:, None, None] | (keys[:, None] > positions[tasks][..., None])[:, None]
        hidden = hidden | (keys[:, None] < (starts[tasks] * size)[..., None])[:, :, None]
        if window_size is not None:
            earliest_seen = window_start(positions[tasks], window_size)
            hidden = hidden | (keys[:, None] < earliest_seen[..., None])[:, None]
        scores = torch.einsum("ngtd,nkd->ngtk", q_rows[tasks], k) * sm_scale + bias
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
        out[tasks] = torch.einsum("ngtk,nkd->ngtd", weights, v)
    return torch.empty_like(q).copy_(out.view(q.shape))
