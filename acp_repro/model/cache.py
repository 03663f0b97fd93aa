"""Memory of generation: keys, values, decays and the token shift's last inputs (Appendix F).

Heads that forget free memory: the boundary never moves back, so blocks of keys behind the boundary return to
a pool permanently. Eviction needs a threshold that cannot fall later. Models with QK-norm have such a
threshold: U is computed from weights (Appendix E), and L is the longest length allowed. Under any other
threshold, blocks are skipped but kept.
"""

from __future__ import annotations

import copy
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from acp_repro.attention import choose_implementation

from .blocks import BLOCK_SIZE
from .layer_cache import DECODE_TOKENS, PAST_BYTES, LayerCache, store_first_tokens

# The per-row state of a cache, besides that of its layers.
_CALL_STATE = ("seq_start", "device_start", "seqlens")


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
        self.fuses = False  # whether the kernels of `step_kernels` may serve this call
        self.seqlens: Tensor | None = None
        self.dropped_columns = 0
        # Layers whose first tokens are not stored yet, with keys, values and log gates of these tokens.
        self._waiting: tuple[tuple[LayerCache, Tensor, Tensor, Tensor], ...] = ()
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    @property
    def batch_size(self) -> int:
        """Rows in the cache; -1 before the first token."""
        return -1 if self.seqlens is None else len(self.seqlens)

    @property
    def lengths(self) -> Tensor:
        """``seqlens``, once the first call has begun."""
        assert self.seqlens is not None
        return self.seqlens

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
        # They run on a GPU, after the padding. Recording for `crop` needs more than the last input of the
        # token shift, and compiled code has its own kernels.
        self.fuses = (
            not (self.length < self.latest_start or self.recording or torch.compiler.is_compiling())
            and choose_implementation(self.seqlens.device) == "triton"
        )
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

    def store_later(self, layer: LayerCache, k: Tensor, v: Tensor, log_fgate: Tensor) -> None:
        """Defers storing the first tokens, so that many layers share kernels and one synchronisation."""
        self._waiting = (*self._waiting, (layer, k, v, log_fgate))
        if len(self._waiting) * 2 * k.numel() * k.element_size() > PAST_BYTES:
            self._store_waiting()

    def _store_waiting(self) -> None:
        waiting, self._waiting = self._waiting, ()
        for evicts in (False, True):
            these = [one for one in waiting if one[0].evicts == evicts]
            if these:
                store_first_tokens(*map(list, zip(*these, strict=True)))

    def reserve(self, tokens: int) -> None:
        """Allocates blocks for ``tokens`` more; synchronises once in ``BLOCK_SIZE`` tokens."""
        self._check_length(tokens)
        columns = -(-(self.tokens_in_table + tokens) // BLOCK_SIZE)
        if all(columns <= layer.filled.columns for layer in self.layers):
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
        pools = [layer.filled for layer in self.layers]
        count = int(torch.stack([pool.first_resident_block.amin() for pool in pools]).amin())
        if not count:
            return
        for pool in pools:
            pool.drop_columns(count)
        self.dropped_columns += count
        self.lengths.sub_(count * BLOCK_SIZE)
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
        self.lengths.sub_(tokens_to_remove)
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
        pools = [layer.filled for layer in self.layers]
        per_head = torch.stack([pool.resident_bytes.cpu() for pool in pools])
        allocated = sum(pool.allocated_bytes for pool in pools)
        return MemoryUse(per_head, per_head.amax(-1) * per_head.shape[-1], allocated)
