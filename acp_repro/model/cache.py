"""What generation remembers: keys, values, decays and the token shift's last inputs (Appendix F).

Heads that forget give memory back: the boundary never falls, so blocks of keys behind it go to a pool for
good. That needs a threshold that cannot fall later, which is one of QK-norm (U from weights, Appendix E)
with the logarithm of the longest length allowed. Under any other threshold blocks are skipped and kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acp_repro.attention import choose_implementation, forgetting_attention_with_kvcache

from .blocks import BLOCK_SIZE, BlockPool, running_sum

# Tokens that are attended as a decoding step; longer chunks as a prefill over what is held.
DECODE_TOKENS = 8


class MemoryUse(NamedTuple):
    """Bytes of a cache: keys, values and decays.

    Attributes:
        per_head: (layers, batch, heads) int64, what each head holds: the ideal.
        per_layer: (layers, batch) int64, what a block table shared by a layer's heads would hold: each
            head as much as the layer's longest.
        allocated: of the pools and tables, blocks that are free included.
    """

    per_head: Tensor
    per_layer: Tensor
    allocated: int


class LayerCache:
    """The memory of one attention layer. Filled by the layer; empty until its first call.

    Attributes:
        logit_bound: U from the QK-norm weights, stored here by the layer, or None.
        threshold: (B, H) delta that cannot fall later, stored here by the layer, or None.
        refusal: why nothing is evicted; empty where blocks are.
    """

    def __init__(self, parent: FoXCache):
        self.parent = parent
        self.logit_bound: Tensor | None = None
        self.threshold: Tensor | None = None
        self.refusal = ""
        self.pool: BlockPool | None = None
        self.start: Tensor | None = None  # (B, H) int32, the first block that a query reads
        self.held: Tensor | None = None  # (B, H) int32, the first block that is there
        self._shift: dict[str, Tensor] = {}
        self._longest_key: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held before the call that is under way, evicted ones included."""
        return self.parent.length

    @property
    def max_length(self) -> int | None:
        return self.parent.max_length

    @property
    def evicts(self) -> bool:
        return self.threshold is not None and not self.parent.recording

    @property
    def fuses(self) -> bool:
        """Whether a step of one token may take the kernels of ``step_kernels``: on a GPU, after the padding,
        and while nothing but the last input of the token shift is kept."""
        parent = self.parent
        held = bool(self.length) and self.length >= parent.latest_start and not parent.recording
        return held and choose_implementation(parent.seqlens.device) == "triton"

    def shift_state(self, name: str) -> Tensor | None:
        """(B, 1, H, D), the token shift's last input of ``name``, or None before the first token."""
        held = self._shift.get(name)
        return None if held is None else held[:, -1:]

    def keep_shift_state(self, name: str, z: Tensor) -> None:
        """Remember the inputs z (B, T, H, D) of the tokens that are added: the last one, or while past is
        recorded all since then, which ``crop`` needs."""
        held = self._shift.get(name)
        if self.parent.recording:
            self._shift[name] = z if held is None else torch.cat((held, z), dim=1)
        elif held is not None and held.dtype == z.dtype and held.shape == z[:, -1:].shape:
            held.copy_(z[:, -1:])  # in place: a CUDA graph reads and writes one address
        else:
            self._shift[name] = z[:, -1:].clone(memory_format=torch.contiguous_format)

    def longest_key(self, k: Tensor) -> Tensor:
        """(B, H, 1, D), per head the longest key of all so far, of which k (B, H, T, D) are the newest."""
        candidates = k if self._longest_key is None else torch.cat((self._longest_key, k), dim=2)
        norms = torch.linalg.vector_norm(candidates, dim=-1, keepdim=True, dtype=torch.float32)
        index = norms.argmax(dim=2, keepdim=True).expand(-1, -1, 1, k.shape[-1])
        longest = candidates.gather(2, index)
        if self._longest_key is None:
            self._longest_key = longest
        return self._longest_key.copy_(longest)  # in place, as above

    def attend(self, core, q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, threshold: Tensor | None):
        """Add T tokens and attend from them to all that is held.

        Args:
            core: computes a prefill, see ``ForgettingAttentionCore``.
            q, k, v: (B, H, T, D). log_fgate: (B, H, T) float32.
            threshold: delta of this call, broadcastable to (B, H), or None.

        Returns:
            (B, H, T, D).

        Raises:
            RuntimeError: gradients are recorded; a cache holds values, no graph.
            ValueError: batch, heads, head_dim or dtype differ from what is held.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, log_fgate)):
            raise RuntimeError("a FoXCache holds no gradients: call the model under torch.no_grad()")
        self._check(k)
        if self.length and k.shape[2] <= DECODE_TOKENS:
            return self._decode(core, q, k, v, log_fgate, threshold)
        return self._prefill(core, q, k, v, log_fgate, threshold)

    def _check(self, k: Tensor) -> None:
        if self.pool is None:
            self.pool = BlockPool(k)
            self.start, self.held = (
                torch.zeros(k.shape[:2], dtype=torch.int32, device=k.device) for _ in range(2)
            )
        given = (*k.shape[:2], k.shape[3], k.dtype)
        if self.pool.signature() != given:
            raise ValueError(
                f"this cache holds (batch, heads, head_dim, dtype) {self.pool.signature()}, got {given}: "
                "continue with the same batch and dtype, or start a new FoXCache"
            )

    def _decode(self, core, q, k, v, log_fgate, threshold):
        seqlens, seq_start = self.parent.seqlens, self.parent.device_start
        self.pool.write(seqlens, k, v, log_fgate)
        if self.threshold is None:
            self.start.copy_(self.held)  # delta may have fallen: search again from what is there
        return forgetting_attention_with_kvcache(
            q,
            self.pool.paged(seqlens),
            self.start,
            head_first=True,
            seq_start=seq_start,
            adaptive_threshold=threshold,
            implementation=core.implementation,
        )

    def _prefill(self, core, q, k, v, log_fgate, threshold):
        pool, parent, tokens = self.pool, self.parent, k.shape[2]
        seq_start, held = parent.device_start, parent.tokens_in_table
        before = torch.zeros(k.shape[:2], dtype=torch.float64, device=k.device)[..., None]
        keys, values, gates = k, v, log_fgate
        if held:
            k_past, v_past, gates_past, first = pool.gather(self.held, held)
            keys, values = torch.cat((k_past, k), 2), torch.cat((v_past, v), 2)
            gates = torch.cat((gates_past, log_fgate), 2)
            # The lengths count the new tokens already.
            before = pool.paged(parent.seqlens).c_at(parent.seqlens.long()[:, None] - tokens - 1)
            if seq_start is not None:
                seq_start = (seq_start - first).clamp(min=0)
        if seq_start is not None:
            seq_start = seq_start.clamp(max=keys.shape[2] - 1)  # of rows that are padding alone so far
        out = core(q, keys, values, gates, threshold, seq_start)
        c = running_sum(log_fgate, before)
        columns = -(-(held + tokens) // BLOCK_SIZE)
        start = self.held.long()
        if self.evicts:
            pruned = c[..., -1:] - pool.end_decays(c, held, columns) < self.threshold.double()[..., None]
            pruned = pruned & (torch.arange(columns, device=c.device) >= start[..., None])
            start = torch.minimum(start + pruned.sum(-1), torch.full_like(start, columns - 1))
            start = self._not_before(start, columns - 1)
            self._evict(start, self.length + tokens)
        pool.take(columns, start)
        pool.write(parent.seqlens, k, v, log_fgate)
        return out

    def _not_before(self, start: Tensor, last: int) -> Tensor:
        """``start`` (B, H), and no block that is padding alone."""
        if self.parent.device_start is None:
            return start
        padding = self.parent.device_start // BLOCK_SIZE
        return torch.maximum(start, padding.clamp(max=last)[:, None])

    def _evict(self, start: Tensor, length: int) -> None:
        """Nothing before ``start`` (B, H) is needed by queries from ``length`` on."""
        if bool((start > self.held).any()):
            self.pool.give_back(start)
            self.parent.evicted_at = length
        self.held.copy_(start)
        self.start.copy_(torch.maximum(self.start, self.held))

    def reserve(self, columns: int) -> None:
        """Blocks up to column ``columns``, after what no query will read has been given back."""
        if columns <= self.pool.columns:
            return
        if self.evicts:
            paged = self.pool.paged(self.parent.seqlens)
            paged.advance(self.start, self.threshold, 1, self.parent.device_start)
            self._evict(self.start.long(), self.length)
        self.pool.take(columns, self.held.long())

    def forget(self, tokens: int, columns: int) -> None:
        """The last ``tokens`` tokens, after which ``columns`` columns are left."""
        for name, z in self._shift.items():
            left = z.shape[1] - tokens
            self._shift[name] = z[:, left - 1 : left].clone()
        if self.pool is not None:
            self.pool.truncate(columns)
            self.start.copy_(self.held)

    def can_forget(self, tokens: int) -> bool:
        return all(z.shape[1] > tokens for z in self._shift.values())

    def select_rows(self, rows: Tensor, parent: FoXCache) -> LayerCache:
        copy = LayerCache(parent)
        copy.logit_bound, copy.refusal = self.logit_bound, self.refusal
        copy._shift = {name: z.index_select(0, rows) for name, z in self._shift.items()}
        for name in ("threshold", "start", "held", "_longest_key"):
            held = getattr(self, name)
            setattr(copy, name, None if held is None else held.index_select(0, rows))
        copy.pool = None if self.pool is None else self.pool.select_rows(rows)
        return copy


class FoXCache:
    """One ``LayerCache`` for each layer; pass it to every call of a model to go on where the last ended.

    Args:
        num_layers: attention layers of the model.
        max_length: the longest length allowed, in tokens, padding included. Longer is an error; with
            QK-norm and ACP it fixes delta, so that what is pruned can be evicted. None allows any length
            and evicts nothing.

    Attributes:
        length: tokens held, evicted ones included.
        seqlens: (B,) int32 on the device, tokens counted from the first column of the block tables.
        evicted_at: the length at which blocks were last evicted; ``crop`` cannot go back behind it.
    """

    def __init__(self, num_layers: int, max_length: int | None = None):
        self.max_length = max_length
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
        """Why nothing is evicted; empty where blocks are, and before the first token."""
        if self.recording:
            return "record_past: tokens that are removed may make what is evicted now needed again"
        return next((layer.refusal for layer in self.layers if layer.refusal), "")

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when storage moves."""
        return tuple(layer.pool.version for layer in self.layers if layer.pool is not None)

    def begin(self, input_ids: Tensor, seq_start: Tensor | None) -> Tensor | None:
        """Make room for the tokens of a call, and count them.

        Args:
            input_ids: (B, T). seq_start: (B,) int64, the first real token of left-padded rows, given with a
                cache's first tokens and remembered.

        Returns:
            (B,) seq_start of all calls, or None: no row is padded.

        Raises:
            ValueError: more tokens than ``max_length``, another batch, or ``seq_start`` given again.
        """
        batch, tokens = input_ids.shape
        self._check_length(tokens)
        if seq_start is not None:
            if self.length:
                raise ValueError("seq_start is given with a cache's first tokens, and remembered")
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
        else:
            self.seqlens.fill_(self.tokens_in_table)  # also after a call that failed half-way
        self.seqlens.add_(tokens)
        return self.seq_start

    def count(self, tokens: int) -> None:
        """``tokens`` more are held: the call that added them is over."""
        self.length += tokens

    def reserve(self, tokens: int) -> None:
        """Room for ``tokens`` more in every layer; waits for the device once in ``BLOCK_SIZE`` tokens.

        Raises:
            ValueError: they would be more than ``max_length``.
        """
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
                f"{self.length + tokens} tokens are more than the cache's max_length {self.max_length}"
            )

    def _drop_columns(self) -> None:
        """Columns that no head of any layer uses go, so that tables do not grow with the stream."""
        count = int(torch.stack([layer.held.amin() for layer in self.layers]).amin())
        if not count:
            return
        for layer in self.layers:
            layer.pool.drop_columns(count)
            layer.held.sub_(count)
            layer.start.sub_(count)
        self.dropped_columns += count
        self.seqlens.sub_(count * BLOCK_SIZE)
        if self.device_start is not None:
            self.device_start.sub_(count * BLOCK_SIZE).clamp_(min=0)

    def record_past(self) -> None:
        """From the next token on, hold what :meth:`crop` needs: inputs of the token shift, and all blocks."""
        self.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``tokens_to_remove`` tokens.

        Raises:
            ValueError: more than are held; or keys that the rows would need again are evicted, or the
                token shift's inputs of back then are not held: say ``record_past`` before.
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
        if not all(layer.can_forget(tokens_to_remove) for layer in self.layers):
            raise ValueError(
                f"the token shift's inputs of {tokens_to_remove} tokens ago are not held: call record_past() "
                "before the tokens that may be removed"
            )
        self.length = left
        self.seqlens.sub_(tokens_to_remove)
        for layer in self.layers:
            layer.forget(tokens_to_remove, -(-self.tokens_in_table // BLOCK_SIZE))

    def select_rows(self, rows: Tensor) -> FoXCache:
        """A copy whose row i is row ``rows[i]`` of this one: several continuations of one context.

        Args:
            rows: (B',) integer indices into the batch; may repeat.
        """
        copy = FoXCache(0, self.max_length)
        for name in ("length", "evicted_at", "recording", "dropped_columns", "latest_start"):
            setattr(copy, name, getattr(self, name))
        if self.seqlens is not None:
            rows = rows.to(self.seqlens.device)
        for name in ("seq_start", "device_start", "seqlens"):
            held = getattr(self, name)
            setattr(copy, name, None if held is None else held.index_select(0, rows))
        copy.layers = [layer.select_rows(rows, copy) for layer in self.layers]
        return copy

    def memory(self) -> MemoryUse:
        """What is held now, in bytes; waits for the device."""
        per_head, per_layer = [], []
        for layer in self.layers:
            pool = layer.pool
            kept = (pool.columns - layer.held.long().cpu()) * pool.block_bytes
            per_head.append(kept)
            per_layer.append(kept.amax(-1) * pool.heads)
        allocated = sum(layer.pool.allocated_bytes for layer in self.layers)
        return MemoryUse(torch.stack(per_head), torch.stack(per_layer), allocated)
