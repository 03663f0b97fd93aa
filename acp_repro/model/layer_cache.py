"""Memory of one layer during generation: blocks of keys and values, and inputs of the token shift."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from acp_repro.attention import forgetting_attention_with_kvcache

from .blocks import BLOCK_SIZE, BlockPool, column_ends, join_pools, number_blocks, running_sum, write_pools

if TYPE_CHECKING:
    from .cache import FoXCache

# Up to this many tokens are computed as a decoding step. Longer chunks are computed as a prefill over the
# cached tokens.
DECODE_TOKENS = 8
# The size limit, in bytes, of dense keys and values during a prefill: those of the past, and those of layers
# whose blocks are not allocated yet.
PAST_BYTES = 2**29
# The per-row state of a layer, besides blocks and inputs of the token shift.
_ROW_STATE = ("threshold", "_longest_key")


class LayerCache:
    """The memory of one attention layer. The layer fills it; it is empty until the first call.

    Attributes:
        logit_bound: U (H,) float32 from the QK-norm weights, stored here by the layer, or None.
        joint_weights: weight and bias of the narrow projections, stored here by the layer, or None.
        threshold: (B, H) float32 delta that cannot fall later, stored here by the layer, or None.
        no_eviction_reason: why nothing is evicted; empty if blocks are evicted.
    """

    def __init__(self, parent: FoXCache):
        # A weak reference, because a cycle would keep gigabytes alive until the garbage collector runs.
        self._parent = weakref.ref(parent)
        self.logit_bound: Tensor | None = None
        self.joint_weights: tuple[Tensor, Tensor | None] | None = None
        self.threshold: Tensor | None = None
        self.no_eviction_reason = ""
        self.pool: BlockPool | None = None  # None before the first tokens
        self.shift_states: dict[str, Tensor] = {}
        self._longest_key: Tensor | None = None
        self._searched = False  # whether the last step advanced first_read_block under a delta that may fall

    @property
    def parent(self) -> FoXCache:
        """The cache that this layer's cache is part of."""
        parent = self._parent()
        assert parent is not None, "a layer's cache lives as long as its FoXCache"
        return parent

    @property
    def filled(self) -> BlockPool:
        """``pool``, once the first tokens are stored."""
        assert self.pool is not None
        return self.pool

    @property
    def evicts(self) -> bool:
        """Whether blocks behind the boundary return to the pool."""
        return self.threshold is not None and not self.parent.recording

    @property
    def fuses(self) -> bool:
        """Whether a layer may use the kernels of ``step_kernels`` in this call."""
        return self.parent.fuses

    def shift_state(self, name: str) -> Tensor | None:
        """(B, 1, H, D), the last input of the token shift ``name``; None before the first token."""
        held = self.shift_states.get(name)
        return None if held is None else held[:, -1:]

    def keep_shift_state(self, name: str, z: Tensor, own: bool = False) -> None:
        """Stores the last input of z (B, T, H, D), or all inputs while the past is recorded for ``crop``.

        If ``own``, z is one token in memory that is not used elsewhere.
        """
        held = self.shift_states.get(name)
        if self.parent.recording:
            self.shift_states[name] = z if held is None else torch.cat((held, z), dim=1)
        elif held is not None and held.dtype == z.dtype and held.shape == z[:, -1:].shape:
            held.copy_(z[:, -1:])  # in place: a CUDA graph reads and writes one address
        else:
            self.shift_states[name] = z if own else z[:, -1:].clone(memory_format=torch.contiguous_format)

    def longest_key(self, k: Tensor) -> Tensor:
        """(B, H, 1, D), the longest key of each head so far; ``k`` (B, H, T, D) are the newest keys."""
        candidates = k if self._longest_key is None else torch.cat((self._longest_key, k), dim=2)
        # In float64, in which squares of float32 numbers neither underflow nor overflow.
        norms = torch.linalg.vector_norm(candidates, dim=-1, keepdim=True, dtype=torch.float64)
        index = norms.argmax(dim=2, keepdim=True).expand(-1, -1, 1, k.shape[-1])
        longest = candidates.gather(2, index)
        if self._longest_key is None:
            self._longest_key = longest
        return self._longest_key.copy_(longest)  # in place, as above

    def attend(self, core, q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, threshold: Tensor | None):
        """Adds T tokens and computes their attention to the cached tokens and to each other: (B, H, T, D) in
        the dtype of q.

        Args:
            core: computes a prefill, see ``ForgettingAttentionCore``.
            q, k, v: (B, H, T, D). log_fgate: (B, H, T) float32.
            threshold: delta of this call, broadcastable to (B, H), or None.

        Raises:
            RuntimeError: gradients are recorded; a cache stores values without a graph.
            ValueError: batch, heads, head_dim or dtype differ from the cached tensors.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, log_fgate)):
            raise RuntimeError("a FoXCache holds no gradients: call the model under torch.no_grad()")
        given = (*k.shape[:2], k.shape[3], k.dtype)
        if self.pool is not None and self.pool.signature() != given:
            raise ValueError(
                f"this cache holds (batch, heads, head_dim, dtype) {self.pool.signature()}, got {given}: "
                "continue with the same batch and dtype, or start a new FoXCache"
            )
        self.parent.touched = True
        compute = self._extend
        if not self.parent.length:
            compute = self._prefill
        elif k.shape[2] <= DECODE_TOKENS:
            compute = self._decode
        return compute(core, q, k, v, log_fgate, threshold)

    def _decode(self, core, q, k, v, log_fgate, threshold):
        pool, parent = self.filled, self.parent
        pool.write(parent.lengths, k, v, log_fgate)
        if self._searched:
            # Delta may have decreased, so the search starts again at the first resident block.
            pool.first_read_block.copy_(pool.first_resident_block)
        self._searched = self.threshold is None and threshold is not None
        return forgetting_attention_with_kvcache(
            q,
            pool.paged(parent.lengths),
            pool.first_read_block,
            head_first=True,
            seq_start=parent.device_start,
            adaptive_threshold=threshold,
            implementation=core.implementation,
        )

    def _prefill(self, core, q, k, v, log_fgate, threshold):
        """Adds the first tokens, which :func:`store_first_tokens` stores."""
        seq_start = self.parent.device_start
        if seq_start is not None:
            seq_start = seq_start.clamp(max=k.shape[2] - 1)  # for rows that contain only padding so far
        out = core(q, k, v, log_fgate, threshold, seq_start)
        self.parent.store_later(self, k, v, log_fgate)
        return out

    def _extend(self, core, q, k, v, log_fgate, threshold):
        """Adds a chunk of tokens after the cached ones."""
        pool, parent, tokens = self.filled, self.parent, k.shape[2]
        seqlens, held = parent.lengths, parent.tokens_in_table
        # The lengths already include the new tokens.
        before = pool.paged(seqlens).c_at(seqlens.long()[:, None] - tokens - 1)
        out = self._attend_past(core, q, k, v, log_fgate, threshold)
        c = before + running_sum(log_fgate)
        columns = -(-(held + tokens) // BLOCK_SIZE)
        start = pool.first_resident_block.long()
        if self.threshold is not None and self.evicts:
            pruned = c[..., -1:] - pool.end_decays(c, held) < self.threshold[..., None]
            pruned = pruned & (torch.arange(pruned.shape[-1], device=c.device) >= start[..., None])
            start = _skip_padding(start + pruned.sum(-1), columns, parent.device_start)
            self._evict(start, parent.length + tokens)
        pool.allocate(columns, start)
        pool.write(seqlens, k, v, log_fgate, c)
        return out

    def _attend_past(self, core, q, k, v, log_fgate, threshold):
        """Attention to the cached and the new tokens, for some rows at a time."""
        # The cached keys and values are gathered into dense tensors, a few rows at a time. For all rows at
        # once, these would need as much memory as the past without ACP.
        held, out = self.parent.tokens_in_table, torch.empty_like(q)
        if threshold is not None:
            threshold = threshold.expand(q.shape[:2])
        row_bytes = 2 * k.element_size() * k.shape[1] * k.shape[3] * (held + k.shape[2])
        at_once = max(PAST_BYTES // row_bytes, 1)
        for first_row in range(0, len(q), at_once):
            rows = slice(first_row, first_row + at_once)
            k_past, v_past, gates_past, first = self.filled.gather(held, rows)
            keys, values = torch.cat((k_past, k[rows]), 2), torch.cat((v_past, v[rows]), 2)
            gates = torch.cat((gates_past, log_fgate[rows]), 2)
            seq_start = self.parent.device_start
            if seq_start is not None:
                seq_start = (seq_start[rows] - first).clamp(min=0, max=keys.shape[2] - 1)
            delta = None if threshold is None else threshold[rows]
            out[rows] = core(q[rows], keys, values, gates, delta, seq_start)
        return out

    def _evict(self, start: Tensor, length: int) -> None:
        """Frees the blocks before ``start`` (B, H), which no query from ``length`` on needs."""
        if self.filled.evict(start):
            self.parent.evicted_at = length

    def reserve(self, columns: int) -> None:
        """Allocates blocks up to column ``columns``, after freeing those that no query will read."""
        pool = self.filled
        if columns <= pool.columns:
            return
        if self.evicts:
            paged = pool.paged(self.parent.lengths)
            paged.advance(pool.first_read_block, self.threshold, 1, self.parent.device_start)
            self._evict(pool.first_read_block.long(), self.parent.length)
        pool.allocate(columns, pool.first_resident_block.long())

    def remove_tokens(self, tokens: int, columns: int) -> None:
        """Removes the last ``tokens`` tokens; ``columns`` columns remain."""
        for name, z in self.shift_states.items():
            self.shift_states[name] = z[:, :-tokens][:, -1:].clone()
        self.filled.truncate(columns)

    def join(self, parts: list[LayerCache]) -> None:
        """Moves the rows of ``parts`` into this layer."""
        first = parts[0]
        self.logit_bound, self.no_eviction_reason = first.logit_bound, first.no_eviction_reason
        self._searched = any(part._searched for part in parts)
        self.shift_states = {
            name: torch.cat([part.shift_states[name] for part in parts]) for name in first.shift_states
        }
        for name in _ROW_STATE:
            held = [getattr(part, name) for part in parts]
            setattr(self, name, None if held[0] is None else torch.cat(held))
        self.pool = join_pools([part.filled for part in parts])

    def select_rows(self, rows: Tensor, parent: FoXCache) -> LayerCache:
        """A copy for ``parent`` whose row i is row ``rows[i]`` of this layer; ``rows`` is (B',) int64."""
        other = copy.copy(self)
        other._parent = weakref.ref(parent)
        other.shift_states = {name: z.index_select(0, rows) for name, z in self.shift_states.items()}
        for name in _ROW_STATE:
            held = getattr(self, name)
            setattr(other, name, None if held is None else held.index_select(0, rows))
        other.pool = None if self.pool is None else self.pool.select_rows(rows)
        return other


def store_first_tokens(layers: list[LayerCache], keys: list, values: list, gates: list) -> None:
    """Writes the first tokens of several layers, of which all evict or none does.

    Blocks are numbered for all layers together. The host waits for the device once, if the layers evict.
    """
    parent, evicts = layers[0].parent, layers[0].evicts
    c = running_sum(torch.cat(gates)).unflatten(0, (len(layers), -1))
    columns = -(-c.shape[-1] // BLOCK_SIZE)
    start = torch.zeros(c.shape[:-1], dtype=torch.int32, device=c.device)
    if evicts:
        threshold = torch.stack([cast(Tensor, layer.threshold) for layer in layers])
        pruned = c[..., -1:] - column_ends(c, 0) < threshold[..., None]
        start = _skip_padding(pruned.sum(-1, dtype=torch.int32), columns, parent.device_start)
    nth, wanted = number_blocks(0, columns, start)
    blocks = start[0].numel() * columns
    counts = nth[:, -1, -1, -1].tolist() if evicts else [blocks] * len(layers)
    if min(counts) < blocks:
        parent.evicted_at = parent.length + c.shape[-1]  # some tokens were never stored
    starts = torch.stack((start, start), 1).int()
    pools = list(map(BlockPool, keys, nth * wanted, counts, starts))
    # Heads read block 0, under a gate of 0, for columns without a block. One kernel clears it in all layers.
    for unused in ([x[0] for pool in pools for x in (pool.k, pool.v)], [pool.c[0] for pool in pools]):
        torch._foreach_zero_(unused)  # pyright: ignore[reportPrivateImportUsage]
    for layer, pool in zip(layers, pools, strict=True):
        layer.pool = pool
    write_pools(parent.lengths, list(zip(pools, keys, values, gates, c, strict=True)))


def _skip_padding(start: Tensor, columns: int, seq_start: Tensor | None) -> Tensor:
    """``start`` (..., B, H), advanced to the first of ``columns`` blocks that contains more than padding."""
    if seq_start is None:
        return start
    padding = (seq_start // BLOCK_SIZE).clamp(max=columns - 1)
    return torch.maximum(start, padding[:, None])
