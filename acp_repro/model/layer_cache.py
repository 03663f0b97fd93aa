"""The part of a cache that belongs to one attention layer; see ``cache``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from acp_repro.attention import choose_implementation, forgetting_attention_with_kvcache

from .blocks import BLOCK_SIZE, BlockPool, join_pools, running_sum

if TYPE_CHECKING:
    from .cache import FoXCache

# Up to this many tokens are computed as a decoding step. Longer chunks are computed as a prefill over what is
# held.
DECODE_TOKENS = 8
# Bytes of past keys and values that a prefill holds densely at once.
_PAST_BYTES = 2**29
# What a layer holds of each row, beside its blocks and the token shift's inputs.
_ROW_STATE = ("threshold", "start", "held", "_longest_key")


class LayerCache:
    """The memory of one attention layer. The layer fills it; it is empty until the first call.

    Attributes:
        logit_bound: U (H,) float32 from the QK-norm weights, stored here by the layer, or None.
        threshold: (B, H) float32 delta that cannot fall later, stored here by the layer, or None.
        refusal: why nothing is evicted; empty if blocks are evicted.
    """

    def __init__(self, parent: FoXCache):
        # Weak: a reference cycle would hold gigabytes until the garbage collector runs.
        self._parent = weakref.ref(parent)
        self.logit_bound: Tensor | None = None
        self.threshold: Tensor | None = None
        self.refusal = ""
        self.pool: BlockPool | None = None
        self.start: Tensor | None = None  # (B, H) int32, the first block that a query reads
        self.held: Tensor | None = None  # (B, H) int32, the first block that is there
        self._shift: dict[str, Tensor] = {}
        self._longest_key: Tensor | None = None

    @property
    def parent(self) -> FoXCache:
        """The cache that this layer's cache is part of."""
        return cast("FoXCache", self._parent())

    @property
    def filled(self) -> tuple[BlockPool, Tensor, Tensor, Tensor]:
        """``pool``, ``start``, ``held`` and the lengths, which are there from the first token on."""
        pool, start, held, seqlens = self.pool, self.start, self.held, self.parent.seqlens
        assert pool is not None and start is not None and held is not None and seqlens is not None
        return pool, start, held, seqlens

    @property
    def evicts(self) -> bool:
        """Whether blocks behind the boundary return to the pool."""
        return self.threshold is not None and not self.parent.recording

    @property
    def fuses(self) -> bool:
        """Whether a layer may use the kernels of ``step_kernels``: on a GPU, after the padding."""
        # And while only the last input of the token shift is kept. Compiled code has its own kernels.
        parent = self.parent
        if parent.length < parent.latest_start or parent.recording or torch.compiler.is_compiling():
            return False
        return parent.seqlens is not None and choose_implementation(parent.seqlens.device) == "triton"

    def shift_state(self, name: str) -> Tensor | None:
        """(B, 1, H, D), the token shift's last input of ``name``; None before the first token."""
        held = self._shift.get(name)
        return None if held is None else held[:, -1:]

    def keep_shift_state(self, name: str, z: Tensor) -> None:
        """Keeps the last of the inputs z (B, T, H, D); while the past is recorded, all, for ``crop``."""
        held = self._shift.get(name)
        if self.parent.recording:
            self._shift[name] = z if held is None else torch.cat((held, z), dim=1)
        elif held is not None and held.dtype == z.dtype and held.shape == z[:, -1:].shape:
            held.copy_(z[:, -1:])  # in place: a CUDA graph reads and writes one address
        else:
            self._shift[name] = z[:, -1:].clone(memory_format=torch.contiguous_format)

    def longest_key(self, k: Tensor) -> Tensor:
        """(B, H, 1, D), the longest key of each head so far; ``k`` (B, H, T, D) are the newest."""
        candidates = k if self._longest_key is None else torch.cat((self._longest_key, k), dim=2)
        # In float64, where squares of float32 numbers neither underflow nor overflow.
        norms = torch.linalg.vector_norm(candidates, dim=-1, keepdim=True, dtype=torch.float64)
        index = norms.argmax(dim=2, keepdim=True).expand(-1, -1, 1, k.shape[-1])
        longest = candidates.gather(2, index)
        if self._longest_key is None:
            self._longest_key = longest
        return self._longest_key.copy_(longest)  # in place, as above

    def attend(self, core, q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, threshold: Tensor | None):
        """Adds T tokens and attends from them to all that is held: (B, H, T, D) in the dtype of q.

        Args:
            core: computes a prefill, see ``ForgettingAttentionCore``.
            q, k, v: (B, H, T, D). log_fgate: (B, H, T) float32.
            threshold: delta of this call, broadcastable to (B, H), or None.

        Raises:
            RuntimeError: gradients are recorded; a cache holds values, no graph.
            ValueError: batch, heads, head_dim or dtype differ from what is held.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, log_fgate)):
            raise RuntimeError("a FoXCache holds no gradients: call the model under torch.no_grad()")
        self._check(k)
        self.parent.touched = True
        if self.parent.length and k.shape[2] <= DECODE_TOKENS:
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
        pool, start, held, seqlens = self.filled
        pool.write(seqlens, k, v, log_fgate)
        if self.threshold is None:
            start.copy_(held)  # delta may have fallen: search again from what is there
        return forgetting_attention_with_kvcache(
            q,
            pool.paged(seqlens),
            start,
            head_first=True,
            seq_start=self.parent.device_start,
            adaptive_threshold=threshold,
            implementation=core.implementation,
        )

    def _prefill(self, core, q, k, v, log_fgate, threshold):
        pool, _, first, seqlens = self.filled
        parent, tokens = self.parent, k.shape[2]
        seq_start, held = parent.device_start, parent.tokens_in_table
        if held:
            # The lengths count the new tokens already.
            before = pool.paged(seqlens).c_at(seqlens.long()[:, None] - tokens - 1)
            out = self._attend_past(core, q, k, v, log_fgate, threshold)
        else:
            before = torch.zeros(k.shape[:2], dtype=torch.float64, device=k.device)[..., None]
            if seq_start is not None:
                seq_start = seq_start.clamp(max=tokens - 1)  # of rows that are padding alone so far
            out = core(q, k, v, log_fgate, threshold, seq_start)
        c = running_sum(log_fgate, before)
        columns = -(-(held + tokens) // BLOCK_SIZE)
        start = first.long()
        if self.threshold is not None and self.evicts:
            pruned = c[..., -1:] - pool.end_decays(c, held, columns) < self.threshold.double()[..., None]
            pruned = pruned & (torch.arange(columns, device=c.device) >= start[..., None])
            start = torch.minimum(start + pruned.sum(-1), torch.full_like(start, columns - 1))
            if parent.device_start is not None:  # past blocks that are padding alone
                padding = (parent.device_start // BLOCK_SIZE).clamp(max=columns - 1)
                start = torch.maximum(start, padding[:, None])
            if held:
                self._evict(start, self.parent.length + tokens)
            else:
                self._move_start(start)
        if pool.take(columns, start) and not held:
            parent.evicted_at = self.parent.length + tokens  # what never had a block
        pool.write(seqlens, k, v, log_fgate, c)
        return out

    def _attend_past(self, core, q, k, v, log_fgate, threshold):
        """Attention to what is held and to the new tokens, for some rows at a time."""
        # What is held is made dense. For all rows that would take as much memory as the past without ACP.
        pool, _, earliest, _ = self.filled
        held, out = self.parent.tokens_in_table, torch.empty_like(q)
        if threshold is not None:
            threshold = threshold.expand(q.shape[:2])
        row_bytes = 2 * k.element_size() * k.shape[1] * k.shape[3] * (held + k.shape[2])
        at_once = max(_PAST_BYTES // row_bytes, 1)
        for first_row in range(0, len(q), at_once):
            rows = slice(first_row, first_row + at_once)
            k_past, v_past, gates_past, first = pool.gather(earliest[rows], held, rows)
            keys, values = torch.cat((k_past, k[rows]), 2), torch.cat((v_past, v[rows]), 2)
            gates = torch.cat((gates_past, log_fgate[rows]), 2)
            seq_start = self.parent.device_start
            if seq_start is not None:
                seq_start = (seq_start[rows] - first).clamp(min=0, max=keys.shape[2] - 1)
            delta = None if threshold is None else threshold[rows]
            out[rows] = core(q[rows], keys, values, gates, delta, seq_start)
        return out

    def _evict(self, start: Tensor, length: int) -> None:
        """Returns blocks before ``start`` (B, H) to the pool: no query from ``length`` on needs them."""
        pool, _, held, _ = self.filled
        if bool((start > held).any()):
            pool.give_back(start)
            self.parent.evicted_at = length
        self._move_start(start)

    def _move_start(self, start: Tensor) -> None:
        _, first_read, held, _ = self.filled
        held.copy_(start)
        first_read.copy_(torch.maximum(first_read, held))

    def reserve(self, columns: int) -> None:
        """Takes blocks up to column ``columns``, after returning those that no query will read."""
        pool, start, held, seqlens = self.filled
        if columns <= pool.columns:
            return
        if self.evicts:
            pool.paged(seqlens).advance(start, self.threshold, 1, self.parent.device_start)
            self._evict(start.long(), self.parent.length)
        pool.take(columns, held.long())

    def remove_tokens(self, tokens: int, columns: int) -> None:
        """Removes the last ``tokens`` tokens; ``columns`` columns are left."""
        for name, z in self._shift.items():
            left = z.shape[1] - tokens
            self._shift[name] = z[:, left - 1 : left].clone()
        if self.pool is not None and self.start is not None and self.held is not None:
            self.pool.truncate(columns)
            self.start.copy_(self.held)

    def can_remove(self, tokens: int) -> bool:
        """Whether inputs of the token shift are held for ``tokens`` tokens ago."""
        return all(z.shape[1] > tokens for z in self._shift.values())

    def join(self, parts: list[LayerCache]) -> None:
        """Takes the rows of ``parts``."""
        first = parts[0]
        self.logit_bound, self.refusal = first.logit_bound, first.refusal
        self._shift = {name: torch.cat([part._shift[name] for part in parts]) for name in first._shift}
        for name in _ROW_STATE:
            held = [getattr(part, name) for part in parts]
            setattr(self, name, None if held[0] is None else torch.cat(held))
        self.pool = join_pools([part.filled[0] for part in parts])

    def select_rows(self, rows: Tensor, parent: FoXCache) -> LayerCache:
        """A copy for ``parent`` whose row i is row ``rows[i]`` of this one; ``rows`` is (B',) int64."""
        copy = LayerCache(parent)
        copy.logit_bound, copy.refusal = self.logit_bound, self.refusal
        copy._shift = {name: z.index_select(0, rows) for name, z in self._shift.items()}
        for name in _ROW_STATE:
            held = getattr(self, name)
            setattr(copy, name, None if held is None else held.index_select(0, rows))
        copy.pool = None if self.pool is None else self.pool.select_rows(rows)
        return copy
