"""What generation remembers: keys, values, decays and the token shift's last inputs (Appendix F).

Heads that forget free memory: the boundary never moves back, so blocks of keys behind it return to a pool for
good. That needs a threshold that cannot fall later. With QK-norm there is one: U comes from weights (Appendix
E), and L is the longest length allowed. Under any other threshold, blocks are skipped but kept.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import BLOCK_SIZE
from .layer_cache import DECODE_TOKENS, LayerCache


class MemoryUse(NamedTuple):
    """Bytes of a cache: keys, values and decays."""

    per_head: Tensor  # (layers, batch, heads) int64, what each head holds: the ideal
    per_layer: Tensor  # (layers, batch) int64, if each head of a layer held as much as its fullest
    allocated: int  # bytes of the pools and tables, free blocks included


class FoXCache:
    """One ``LayerCache`` for each layer. Pass it to each call of a model to go on where the last one ended.

    Args:
        num_layers: attention layers of the model.
        max_length: the longest length allowed, in tokens, padding included. Longer is an error. With QK-norm
            and ACP it fixes delta, so that pruned blocks can be evicted. None allows any length and evicts
            nothing.

    Attributes:
        length: tokens held, evicted ones included.
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
        self._in_call = False  # between begin and count; after a call that failed too
        self.touched = False  # a layer has written since begin
        self._in_inference_mode = torch.is_inference_mode_enabled()
        self.length = 0
        self.evicted_at = 0
        self.recording = False
        self.seq_start: Tensor | None = None
        self.device_start: Tensor | None = None  # seq_start, counted as seqlens are
        self.latest_start = 0
        self.seqlens: Tensor | None = None
        self.dropped_columns = 0
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first token."""
        return -1 if self.seqlens is None else len(self.seqlens)

    @property
    def tokens_in_table(self) -> int:
        """Tokens counted from the first column of the block tables."""
        return self.length - self.dropped_columns * BLOCK_SIZE

    @property
    def refusal(self) -> str:
        """Why nothing is evicted; empty if blocks are evicted, and before the first token."""
        if self.recording:
            return "record_past: tokens that are removed may make what is evicted now needed again"
        return next((layer.refusal for layer in self.layers if layer.refusal), "")

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when storage moves."""
        return tuple(layer.pool.version for layer in self.layers if layer.pool is not None)

    def begin(self, input_ids: Tensor, seq_start: Tensor | None, model: object = None) -> Tensor | None:
        """Makes room for the tokens of a call, and counts them; returns the remembered ``seq_start``.

        Args:
            model: the calling model. Only the model that began a cache can continue it.
            input_ids: (B, T) integer, or embeddings (B, T, hidden).
            seq_start: (B,) int64, the first real token of left-padded rows, given with the first tokens.

        Raises:
            ValueError: more tokens than ``max_length``, another batch or model, or ``seq_start`` given again.
                Also if an earlier call failed after layers had written.
        """
        batch, tokens = input_ids.shape[:2]
        self._check_length(tokens)
        if torch.compiler.is_compiling():
            model = None  # compiled code cannot follow a weak reference to a module
        elif torch.is_inference_mode_enabled():
            self._in_inference_mode = True
        elif self._in_inference_mode:
            self._leave_inference_mode()
        if self._model is not None and model is not None and self._model() is not model:
            raise ValueError(
                "another model began this cache: continue with that one, or start a new FoXCache"
            )
        if self._in_call:
            if self.touched:
                raise ValueError("a failed call left this cache half written: start a new FoXCache")
            if self.seqlens is not None:
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
        """Copies what was made under ``torch.inference_mode``: outside it, nothing may write there."""
        self._in_inference_mode = False
        for holder in (self, *self.layers, *(layer.pool for layer in self.layers if layer.pool)):
            for held in (vars(holder), getattr(holder, "_shift", {})):
                held |= {n: x.clone() for n, x in held.items() if isinstance(x, Tensor) and x.is_inference()}

    def count(self, tokens: int) -> None:
        """Counts ``tokens`` more as held, at the end of the call that added them."""
        self.length += tokens
        self._in_call = self.touched = False

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` more; waits for the device once in ``BLOCK_SIZE`` tokens."""
        self._check_length(tokens)
        columns = -(-(self.tokens_in_table + tokens) // BLOCK_SIZE)
        if all(columns <= layer.filled[0].columns for layer in self.layers):
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
        """Drops columns that no head of any layer uses, so that tables do not grow with the stream."""
        count = int(torch.stack([layer.filled[2].amin() for layer in self.layers]).amin())
        if not count:
            return
        for layer in self.layers:
            pool, start, held, _ = layer.filled
            pool.drop_columns(count)
            held.sub_(count)
            start.sub_(count)
        self.dropped_columns += count
        assert self.seqlens is not None
        self.seqlens.sub_(count * BLOCK_SIZE)
        if self.device_start is not None:
            self.device_start.sub_(count * BLOCK_SIZE).clamp_(min=0)

    def record_past(self) -> None:
        """From the next token on, keeps what :meth:`crop` needs: the token shift's inputs, all blocks."""
        self.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``tokens_to_remove`` tokens.

        Raises:
            ValueError: more than are held; or keys that the rows would need again are evicted; or old inputs
                of the token shift are not held. Call ``record_past`` first.
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
        if not all(layer.can_remove(tokens_to_remove) for layer in self.layers):
            raise ValueError(
                f"the token shift's inputs of {tokens_to_remove} tokens ago are not held: call record_past() "
                "before the tokens that may be removed"
            )
        self.length = left
        assert self.seqlens is not None
        self.seqlens.sub_(tokens_to_remove)
        for layer in self.layers:
            layer.remove_tokens(tokens_to_remove, -(-self.tokens_in_table // BLOCK_SIZE))

    def select_rows(self, rows: Tensor) -> FoXCache:
        """A copy whose row i is row ``rows[i]`` (B',) int64 of this one; several may continue one context."""
        copy = FoXCache(0, self.max_length)
        copy._in_call, copy.touched = self._in_call, self.touched
        for name in ("length", "evicted_at", "recording", "dropped_columns", "latest_start", "_model"):
            setattr(copy, name, getattr(self, name))
        if self.seqlens is not None:
            rows = rows.to(self.seqlens.device)
        for name in ("seq_start", "device_start", "seqlens"):
            held = getattr(self, name)
            setattr(copy, name, None if held is None else held.index_select(0, rows))
        copy.layers = [layer.select_rows(rows, copy) for layer in self.layers]
        return copy

    def make_empty(self) -> FoXCache:
        """An empty cache for the same model and lengths, of any rows; see :meth:`join`."""
        other = FoXCache(len(self.layers), self.max_length)
        other.recording = self.recording
        return other

    def join(self, parts: list[FoXCache]) -> None:
        """Takes the rows of ``parts``, caches filled in the same calls, which are unusable after it."""
        # Their memory goes layer by layer.
        self._model, self.length = parts[0]._model, parts[0].length
        self.evicted_at = max(part.evicted_at for part in parts)
        self.latest_start = max(part.latest_start for part in parts)
        for name in ("seq_start", "device_start", "seqlens"):
            held = [getattr(part, name) for part in parts]
            setattr(self, name, None if held[0] is None else torch.cat(held))
        for layer in self.layers:
            layer.join([part.layers.pop(0) for part in parts])

    def __deepcopy__(self, memo: dict) -> FoXCache:
        """A prompt is filled once and copied; the layers of the copy refer to the copy."""
        return self.select_rows(torch.arange(max(self.batch_size, 0)))

    def memory(self) -> MemoryUse:
        """What is held now, in bytes. It waits for the device."""
        per_head, per_layer = [], []
        for layer in self.layers:
            pool, _, held, _ = layer.filled
            kept = (pool.columns - held.long().cpu()) * pool.block_bytes
            per_head.append(kept)
            per_layer.append(kept.amax(-1) * pool.heads)
        allocated = sum(layer.filled[0].allocated_bytes for layer in self.layers)
        return MemoryUse(torch.stack(per_head), torch.stack(per_layer), allocated)
