"""Memory of generation: keys, values, decays and the token shift's last inputs (Appendix F).

Heads that forget free memory: the boundary never moves back, so blocks of keys behind the boundary return to
a pool permanently. Eviction needs a threshold that cannot fall later. Models with QK-norm have such a
threshold: U is computed from weights (Appendix E), and L is the longest length allowed. Under any other
threshold, blocks are skipped but kept.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from acp_repro.attention import choose_implementation, forgetting_attention_with_kvcache

from .blocks import BLOCK_SIZE, BlockPool, column_ends, join_pools, number_blocks, running_sum

# Up to this many tokens are computed as a decoding step. Longer chunks are computed as a prefill over the
# cached tokens.
DECODE_TOKENS = 8
# The size limit, in bytes, of dense keys and values during a prefill: those of the past, and those of layers
# whose blocks are not allocated yet.
_PAST_BYTES = 2**29
# The per-row state of a cache and of a layer, besides blocks and inputs of the token shift.
_CALL_STATE = ("seq_start", "device_start", "seqlens")
_ROW_STATE = ("threshold", "first_read_block", "first_resident_block", "_longest_key")


class MemoryUse(NamedTuple):
    """Bytes of a cache: keys, values and decays."""

    per_head: Tensor  # (layers, batch, heads) int64, the bytes of each head: the minimum
    per_layer: Tensor  # (layers, batch) int64, if every head of a layer were as large as the largest
    allocated: int  # bytes of pools and tables, including free blocks


class FoXCache:
    """One ``LayerCache`` for each layer. Pass the cache to each call of a model to continue the sequence of
    the previous call.

    Args:
        num_layers: attention layers of the model.
        max_length: the longest length allowed, in tokens, padding included. Longer is an error. With QK-norm
            and ACP this length fixes delta, so that pruned blocks can be evicted. None allows any length and
            evicts nothing.

    Attributes:
        length: tokens in the cache, including evicted ones.
        seqlens: (B,) int32 on the device, tokens counted from the first column of the block tables.
        evicted_at: the length at which blocks were last evicted; ``crop`` cannot go back before it.

    Raises:
        ValueError: ``max_length`` is below 1.
    """

    def __init__(self, num_layers: int, max_length: int | None = None):
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, or None for any length, got {max_length}")
        self.max_length = max_length
        self._model: weakref.ref | None = None
        self._in_call = False  # True between begin and count, and after a failed call
        self.touched = False  # whether a layer has written since begin
        self._in_inference_mode = torch.is_inference_mode_enabled()
        self.length = 0
        self.evicted_at = 0
        self.recording = False
        self.seq_start: Tensor | None = None
        self.device_start: Tensor | None = None  # seq_start, counted like seqlens
        self.latest_start = 0
        self.seqlens: Any = None
        self.dropped_columns = 0
        # Layers whose first tokens are not stored yet: the number of their blocks, and the function that
        # stores.
        self._waiting: tuple[tuple[Tensor, Callable[[int], None]], ...] = ()
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    @property
    def batch_size(self) -> int:
        """Rows in the cache; -1 before the first token."""
        return -1 if self.seqlens is None else len(self.seqlens)

    @property
    def tokens_in_table(self) -> int:
        """Tokens counted from the first column of the block tables."""
        return self.length - self.dropped_columns * BLOCK_SIZE

    @property
    def no_eviction_reason(self) -> str:
        """The reason why nothing is evicted; empty if blocks are evicted, and before the first token."""
        if self.recording:
            return "record_past: tokens that are removed may make what is evicted now needed again"
        return next((layer.no_eviction_reason for layer in self.layers if layer.no_eviction_reason), "")

    @property
    def version(self) -> tuple[int, ...]:
        """A value that changes when storage moves."""
        return tuple(layer.pool.version for layer in self.layers if layer.pool is not None)

    def begin(self, input_ids: Tensor, seq_start: Tensor | None, model: object = None) -> Tensor | None:
        """Allocates and counts the tokens of a call; returns the stored ``seq_start``.

        Args:
            model: the calling model. A cache can be continued only by the model that began it.
            input_ids: (B, T) integer, or embeddings (B, T, hidden).
            seq_start: (B,) int64, the first real token of left-padded rows, given with the first tokens.

        Raises:
            ValueError: more tokens than ``max_length``, another batch or model, or ``seq_start`` given again.
                Also if an earlier call failed after layers had written.
        """
        batch, tokens = input_ids.shape[:2]
        self._check_length(tokens)
        if torch.compiler.is_compiling():
            model = None  # torch.compile does not support weak references to modules
        elif torch.is_inference_mode_enabled():
            self._in_inference_mode = True
        elif self._in_inference_mode:
            self._leave_inference_mode()
        if self._model is not None and model is not None and self._model() is not model:
            raise ValueError(
                "another model began this cache: continue with that one, or start a new FoXCache"
            )
        if self.touched:
            raise ValueError("a failed call left this cache half written: start a new FoXCache")
        if self._in_call and self.seqlens is not None:
            self.seqlens.fill_(self.tokens_in_table)
        if seq_start is not None:
            if self.length:
                raise ValueError(
                    "seq_start is given with a cache's first tokens only: leave it out of later calls"
                )
            self.seq_start, self.device_start = seq_start, seq_start.clone()
            self.latest_start = int(seq_start.max())
        if self.seqlens is None:
            self.seqlens = torch.zeros(batch, dtype=torch.int32, device=input_ids.device)
        elif len(self.seqlens) != batch:
            raise ValueError(
                f"this cache holds a batch of {len(self.seqlens)}, got {batch}: continue with the same batch"
                " and dtype, or start a new FoXCache"
            )
        if self.length and tokens <= DECODE_TOKENS:
            self.reserve(tokens)
        if self._model is None and model is not None:
            self._model = weakref.ref(model)
        self._in_call, self.touched = True, False
        self.seqlens.add_(tokens)
        return self.seq_start

    def _leave_inference_mode(self) -> None:
        """Copies tensors created under ``torch.inference_mode``, which are read-only outside it."""
        self._in_inference_mode = False
        for holder in (self, *self.layers, *(layer.pool for layer in self.layers if layer.pool)):
            for held in (vars(holder), getattr(holder, "shift_states", {})):
                held |= {n: x.clone() for n, x in held.items() if isinstance(x, Tensor) and x.is_inference()}

    def count(self, tokens: int) -> None:
        """Adds ``tokens`` to the length, at the end of the call that added them."""
        self._store_waiting()
        self.length += tokens
        self._in_call = self.touched = False

    def store_later(self, count: Tensor, k: Tensor, store: Callable[[int], None]) -> None:
        """Defers ``store``, so that many layers share one synchronisation; k needs ``count`` blocks."""
        self._waiting = (*self._waiting, (count, store))
        if len(self._waiting) * 2 * k.numel() * k.element_size() > _PAST_BYTES:
            self._store_waiting()

    def _store_waiting(self) -> None:
        """Runs the deferred stores with a single synchronisation."""
        waiting, self._waiting = self._waiting, ()
        counts = torch.stack([count for count, _ in waiting]).tolist() if waiting else []
        for (_, store), count in zip(waiting, counts, strict=True):
            store(count)

    def reserve(self, tokens: int) -> None:
        """Allocates blocks for ``tokens`` more; synchronises once in ``BLOCK_SIZE`` tokens."""
        self._check_length(tokens)
        columns = -(-(self.tokens_in_table + tokens) // BLOCK_SIZE)
        if all(columns <= layer.pool.columns for layer in self.layers):
            return
        for layer in self.layers:
            layer.reserve(columns)
        if all(layer.evicts for layer in self.layers):
            self._drop_columns()

    def _check_length(self, tokens: int) -> None:
        if self.max_length is not None and self.length + tokens > self.max_length:
            raise ValueError(
                f"{self.length + tokens} tokens are more than the cache's max_length {self.max_length}: "
                "start a new cache with a larger one, or with None"
            )

    def _drop_columns(self) -> None:
        """Removes columns that no head of any layer uses, so that tables do not grow with the stream."""
        count = int(torch.stack([layer.first_resident_block.amin() for layer in self.layers]).amin())
        if not count:
            return
        for layer in self.layers:
            layer.pool.drop_columns(count)
            layer.first_resident_block.sub_(count)
            layer.first_read_block.sub_(count)
        self.dropped_columns += count
        self.seqlens.sub_(count * BLOCK_SIZE)
        if self.device_start is not None:
            self.device_start.sub_(count * BLOCK_SIZE).clamp_(min=0)

    def record_past(self) -> None:
        """From the next token on, keeps the state for :meth:`crop`: token-shift inputs and all blocks."""
        self.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``tokens_to_remove`` tokens.

        Raises:
            ValueError: the cache has fewer tokens; or keys that the rows would need again are evicted; or old
                inputs of the token shift are not stored. Call ``record_past`` first.
        """
        left = self.length - tokens_to_remove
        if tokens_to_remove < 0 or left < 0:
            raise ValueError(f"cannot remove {tokens_to_remove} tokens from a cache of {self.length}")
        if not tokens_to_remove:
            return
        if left < self.evicted_at:
            raise ValueError(
                f"keys were evicted at length {self.evicted_at}, so the cache cannot go back to {left}: call "
                "record_past() before the tokens that may be removed"
            )
        if any(z.shape[1] <= tokens_to_remove for layer in self.layers for z in layer.shift_states.values()):
            raise ValueError(
                f"the token shift's inputs of {tokens_to_remove} tokens ago are not held: call record_past() "
                "before the tokens that may be removed"
            )
        self.length = left
        self.seqlens.sub_(tokens_to_remove)
        for layer in self.layers:
            layer.remove_tokens(tokens_to_remove, -(-self.tokens_in_table // BLOCK_SIZE))

    def select_rows(self, rows: Tensor) -> FoXCache:
        """A copy whose row i is row ``rows[i]`` (B',) int64 of this cache; rows may repeat."""
        other = copy.copy(self)
        other._in_inference_mode |= torch.is_inference_mode_enabled()
        if self.seqlens is not None:
            rows = rows.to(self.seqlens.device)
        for name in _CALL_STATE:
            held = getattr(self, name)
            setattr(other, name, None if held is None else held.index_select(0, rows))
        other.layers = [layer.select_rows(rows, other) for layer in self.layers]
        return other

    def join(self, parts: list[FoXCache]) -> None:
        """Moves the rows of ``parts``, which are filled copies of this empty cache, into this cache."""
        # The memory is freed layer by layer.
        self._model, self.length = parts[0]._model, parts[0].length
        self.evicted_at = max(part.evicted_at for part in parts)
        self.latest_start = max(part.latest_start for part in parts)
        for name in _CALL_STATE:
            held = [getattr(part, name) for part in parts]
            setattr(self, name, None if held[0] is None else torch.cat(held))
        for layer in self.layers:
            layer.join([part.layers.pop(0) for part in parts])

    def __deepcopy__(self, memo: dict) -> FoXCache:
        """A deep copy, whose layers refer to the copy; a prompt's cache can be filled once and copied."""
        return self.select_rows(torch.arange(max(self.batch_size, 0)))

    def memory(self) -> MemoryUse:
        """The present memory use, in bytes. Synchronises with the device."""
        per_head = torch.stack(
            [
                (layer.pool.columns - layer.first_resident_block.long().cpu()) * layer.pool.block_bytes
                for layer in self.layers
            ]
        )
        allocated = sum(layer.pool.allocated_bytes for layer in self.layers)
        return MemoryUse(per_head, per_head.amax(-1) * per_head.shape[-1], allocated)


class LayerCache:
    """The memory of one attention layer. The layer fills it; it is empty until the first call.

    Attributes:
        logit_bound: U (H,) float32 from the QK-norm weights, stored here by the layer, or None.
        threshold: (B, H) float32 delta that cannot fall later, stored here by the layer, or None.
        no_eviction_reason: why nothing is evicted; empty if blocks are evicted.
    """

    def __init__(self, parent: FoXCache):
        # A weak reference, because a cycle would keep gigabytes alive until the garbage collector runs.
        self._parent = weakref.ref(parent)
        self.logit_bound: Tensor | None = None
        self.threshold: Tensor | None = None
        self.no_eviction_reason = ""
        # None before the first tokens:
        self.pool: Any = None  # BlockPool
        self.first_read_block: Any = None  # (B, H) int32, the first block that a query reads
        self.first_resident_block: Any = None  # (B, H) int32, the first block in the pool
        self.shift_states: dict[str, Tensor] = {}
        self._longest_key: Tensor | None = None
        self._searched = False  # whether the last step advanced first_read_block under a delta that may fall

    @property
    def parent(self) -> FoXCache:
        """The cache that this layer's cache is part of."""
        return cast("FoXCache", self._parent())

    @property
    def evicts(self) -> bool:
        """Whether blocks behind the boundary return to the pool."""
        return self.threshold is not None and not self.parent.recording

    @property
    def fuses(self) -> bool:
        """Whether a layer may use the kernels of ``step_kernels``: on a GPU, after the padding."""
        # Recording for `crop` needs more than the last input of the token shift, and compiled code has its
        # own kernels.
        parent = self.parent
        if parent.length < parent.latest_start or parent.recording or torch.compiler.is_compiling():
            return False
        return parent.seqlens is not None and choose_implementation(parent.seqlens.device) == "triton"

    def shift_state(self, name: str) -> Tensor | None:
        """(B, 1, H, D), the last input of the token shift ``name``; None before the first token."""
        held = self.shift_states.get(name)
        return None if held is None else held[:, -1:]

    def keep_shift_state(self, name: str, z: Tensor) -> None:
        """Stores the last input of z (B, T, H, D), or all inputs while the past is recorded for ``crop``."""
        held = self.shift_states.get(name)
        if self.parent.recording:
            self.shift_states[name] = z if held is None else torch.cat((held, z), dim=1)
        elif held is not None and held.dtype == z.dtype and held.shape == z[:, -1:].shape:
            held.copy_(z[:, -1:])  # in place: a CUDA graph reads and writes one address
        else:
            self.shift_states[name] = z[:, -1:].clone(memory_format=torch.contiguous_format)

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
        self.pool.write(self.parent.seqlens, k, v, log_fgate)
        if self._searched:
            # Delta may have decreased, so the search starts again at the first resident block.
            self.first_read_block.copy_(self.first_resident_block)
        self._searched = self.threshold is None and threshold is not None
        return forgetting_attention_with_kvcache(
            q,
            self.pool.paged(self.parent.seqlens),
            self.first_read_block,
            head_first=True,
            seq_start=self.parent.device_start,
            adaptive_threshold=threshold,
            implementation=core.implementation,
        )

    def _prefill(self, core, q, k, v, log_fgate, threshold):
        """Adds the first tokens; blocks are allocated when several layers can share one synchronisation."""
        parent, tokens = self.parent, k.shape[2]
        seq_start = parent.device_start
        if seq_start is not None:
            seq_start = seq_start.clamp(max=tokens - 1)  # for rows that contain only padding so far
        out = core(q, k, v, log_fgate, threshold, seq_start)
        c, columns = running_sum(log_fgate), -(-tokens // BLOCK_SIZE)
        store = functools.partial(self._store, k, v, log_fgate, c)
        if self.threshold is not None and self.evicts:
            pruned = c[..., -1:] - column_ends(c, 0) < self.threshold[..., None]
            start = pruned.sum(-1, dtype=torch.int32)
            start = self._skip_padding(start, columns)
            nth, wanted = number_blocks(0, columns, start)
            parent.store_later(nth[-1, -1, -1], k, functools.partial(store, nth * wanted, start.int()))
        else:
            blocks = k.shape[0] * k.shape[1] * columns
            table = torch.arange(1, blocks + 1, dtype=torch.int32, device=k.device)
            start = table.new_zeros(k.shape[:2])
            store(table.view(*k.shape[:2], columns), start, blocks)
        return out

    def _store(self, k, v, log_fgate, c, table, start, count: int) -> None:
        """Writes the first tokens to ``count`` blocks, which ``table`` gives each head from ``start`` on."""
        self.first_resident_block, self.first_read_block = start, start.clone()
        self.pool = BlockPool(k, table, count)
        if count < table.numel():
            self.parent.evicted_at = self.parent.length + k.shape[2]  # some tokens were never stored
        self.pool.write(self.parent.seqlens, k, v, log_fgate, c)

    def _skip_padding(self, start: Tensor, columns: int) -> Tensor:
        """``start`` (B, H), advanced to the first of ``columns`` blocks that contains more than padding."""
        if self.parent.device_start is None:
            return start
        padding = (self.parent.device_start // BLOCK_SIZE).clamp(max=columns - 1)
        return torch.maximum(start, padding[:, None])

    def _extend(self, core, q, k, v, log_fgate, threshold):
        """Adds a chunk of tokens after the cached ones."""
        pool, parent, tokens = self.pool, self.parent, k.shape[2]
        seqlens, held = parent.seqlens, parent.tokens_in_table
        # The lengths already include the new tokens.
        before = pool.paged(seqlens).c_at(seqlens.long()[:, None] - tokens - 1)
        out = self._attend_past(core, q, k, v, log_fgate, threshold)
        c = before + running_sum(log_fgate)
        columns = -(-(held + tokens) // BLOCK_SIZE)
        start = self.first_resident_block.long()
        if self.threshold is not None and self.evicts:
            pruned = c[..., -1:] - pool.end_decays(c, held) < self.threshold[..., None]
            pruned = pruned & (torch.arange(pruned.shape[-1], device=c.device) >= start[..., None])
            start = self._skip_padding(start + pruned.sum(-1), columns)
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
        at_once = max(_PAST_BYTES // row_bytes, 1)
        for first_row in range(0, len(q), at_once):
            rows = slice(first_row, first_row + at_once)
            k_past, v_past, gates_past, first = self.pool.gather(self.first_resident_block[rows], held, rows)
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
        if bool((start > self.first_resident_block).any()):
            self.pool.release(start)
            self.parent.evicted_at = length
        self.first_resident_block.copy_(start)
        self.first_read_block.copy_(torch.maximum(self.first_read_block, self.first_resident_block))

    def reserve(self, columns: int) -> None:
        """Allocates blocks up to column ``columns``, after freeing those that no query will read."""
        if columns <= self.pool.columns:
            return
        if self.evicts:
            paged = self.pool.paged(self.parent.seqlens)
            paged.advance(self.first_read_block, self.threshold, 1, self.parent.device_start)
            self._evict(self.first_read_block.long(), self.parent.length)
        self.pool.allocate(columns, self.first_resident_block.long())

    def remove_tokens(self, tokens: int, columns: int) -> None:
        """Removes the last ``tokens`` tokens; ``columns`` columns remain."""
        for name, z in self.shift_states.items():
            self.shift_states[name] = z[:, :-tokens][:, -1:].clone()
        self.pool.truncate(columns)
        self.first_read_block.copy_(self.first_resident_block)

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
        self.pool = join_pools([part.pool for part in parts])

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
