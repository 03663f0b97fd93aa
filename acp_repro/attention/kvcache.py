"""A paged cache of keys, values and decays of past tokens, with separate blocks for each head (Appendix F).

A block contains ``block_size`` consecutive tokens of one head. ``block_table`` contains the storage index of
each block, so heads can evict individual blocks. ``c``, the running sum of the log gates, is float64. After a
million tokens with a mean log gate of -5 its spacing is 1e-9, so differences need no second reference value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .boundary import window_start
from .checks import check_gates
from .decay import LOG_FGATE_FLOOR


class PagedKVCache(NamedTuple):
    """The cache that :func:`acp_repro.attention.forgetting_attention_with_kvcache` reads.

    Attributes:
        k, v: (num_blocks, block_size, head_dim), block_size a power of two, at least 16.
        c: (num_blocks, group, block_size) float64, the running sum of log forget gates of the ``group`` query
            heads that read the block. All blocks of a head share an arbitrary additive constant.
        block_table: (batch, kv_heads, max_blocks) int32, the index of the block with the tokens
            ``n * block_size ...`` of each head. Entries of blocks that no query reads may be any number from
            0 to num_blocks - 1.
        seqlens: (batch,) int32, the number of tokens of each row, including the newest; 0 for an idle row.
        start_block: (batch, heads) int32, the first block that each query head reads, or None if the caller
            passes this tensor with every call.
    """

    k: Tensor
    v: Tensor
    c: Tensor
    block_table: Tensor
    seqlens: Tensor
    start_block: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        batch: int,
        heads: int,
        tokens: int,
        head_dim: int,
        *,
        kv_heads: int | None = None,
        block_size: int = 64,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> PagedKVCache:
        """An empty cache with blocks for ``tokens`` tokens in each of ``batch`` rows.

        Args:
            heads: number of query heads. kv_heads: number of heads of k and v, a divisor of ``heads``;
                default ``heads``.
            block_size: tokens per block, a power of two, at least 16.
            dtype: dtype of q, k and v. ``dtype`` and ``device`` default to those of :func:`torch.zeros`.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        columns = -(-tokens // block_size)
        blocks = batch * kv_heads * columns
        k, v = (torch.zeros((blocks, block_size, head_dim), dtype=dtype, device=device) for _ in range(2))
        c = torch.zeros((blocks, heads // kv_heads, block_size), dtype=torch.float64, device=k.device)
        table = torch.arange(blocks, dtype=torch.int32, device=k.device).view(batch, kv_heads, columns)
        start_block = torch.zeros((batch, heads), dtype=torch.int32, device=k.device)
        return cls(k, v, c, table, torch.zeros_like(start_block[:, 0]), start_block)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """The largest number of tokens per row that ``block_table`` can address."""
        return self.block_table.shape[2] * self.block_size

    def positions(self, seqlen_q: int) -> Tensor:
        """(batch, seqlen_q) int64, positions of the last ``seqlen_q`` tokens; negative in shorter rows."""
        return self.seqlens.long()[:, None] + torch.arange(-seqlen_q, 0, device=self.seqlens.device)

    def c_at(self, positions: Tensor) -> Tensor:
        """(batch, heads, T) float64: c at ``positions`` (batch, T); 0 at negative positions."""
        blocks = self._blocks_at(positions)
        c = self.c[blocks, :, (positions % self.block_size)[:, None]]  # (B, Hkv, T, G)
        c = c.masked_fill((positions < 0)[:, None, :, None], 0.0)
        return c.transpose(2, 3).flatten(1, 2)

    def _blocks_at(self, positions: Tensor) -> Tensor:
        """(batch, kv_heads, T) int64, the indices of the blocks that contain ``positions`` (batch, T)."""
        columns = positions.clamp(min=0) // self.block_size
        heads = self.block_table.shape[1]
        return self.block_table.long().gather(2, columns[:, None].expand(-1, heads, -1))

    def write(self, k: Tensor, v: Tensor, log_fgate: Tensor) -> None:
        """Writes the newest tokens to the blocks in the table, without host synchronisation.

        Args:
            k, v: (batch, kv_heads, T, head_dim); ``seqlens`` already includes these T tokens. For a row with
                fewer tokens, only the last ``seqlens`` of the T are written.
            log_fgate: (batch, heads, T) float32, clamped to :data:`.decay.LOG_FGATE_FLOOR`. Decoding is exact
                if scores differ by at most :data:`.decay.MOST_ACROSS_FLOOR`.
        """
        positions = self.positions(k.shape[2])
        if not positions.numel():
            return
        blocks = self._blocks_at(positions)
        slots = (positions % self.block_size)[:, None]
        real = (positions >= 0)[:, None]
        log_fgate = log_fgate.masked_fill(~real, 0.0)
        check_gates(log_fgate)
        c = log_fgate.double().clamp(min=LOG_FGATE_FLOOR).cumsum(-1) + self.c_at(positions[:, :1] - 1)
        c = c.unflatten(1, (-1, self.c.shape[1])).transpose(2, 3)
        # Entries without a token are redirected to the newest token of the longest row and repeat its values.
        longest = self.seqlens.argmax()[None]
        block, slot = blocks[longest, :, -1:], slots[longest, :, -1:]
        blocks, slots = torch.where(real, blocks, block), torch.where(real, slots, slot)
        for cached, x in ((self.k, k), (self.v, v), (self.c.transpose(1, 2), c)):
            there = cached[block, slot]  # the current content, in case all rows are idle
            there = torch.where(real[longest, :, -1:, None], x[longest, :, -1:].to(cached.dtype), there)
            cached[blocks, slots] = torch.where(real[..., None], x.to(cached.dtype), there)

    def advance(
        self,
        start_block: Tensor,
        threshold: Tensor | None,
        seqlen_q: int,
        seq_start: Tensor | None = None,
        window_size: int | None = None,
    ) -> None:
        """Advances the first kept block of each head in place, as far as the oldest query permits.

        Block l is pruned if ``c[position of the oldest query] - c[last position of l] < threshold``. The
        block that contains the oldest query is never pruned. Later queries prune at least as much, so every
        block is skipped only once. Blocks entirely before ``seq_start`` or the oldest query's window are
        skipped too.

        Args:
            start_block: (batch, heads) int32.
            threshold: (batch, heads) float32, delta; None prunes nothing.
            seqlen_q: the number of query tokens, which are the last tokens of each row.
            seq_start: (batch,) int64. window_size: keys that a query sees.
        """
        first = self.positions(seqlen_q)[:, :1].clamp(min=0)
        diagonal = (first // self.block_size).unsqueeze(1)  # (B, 1, 1)
        start = start_block.long()
        if seq_start is not None:
            start = torch.maximum(start, (seq_start // self.block_size)[:, None])
        if window_size is not None:
            start = torch.maximum(start, window_start(first, window_size).clamp(min=0) // self.block_size)
        if threshold is not None:
            ends = self.c[self.block_table.long(), :, -1].transpose(2, 3).flatten(1, 2)  # (B, H, N)
            column = torch.arange(ends.shape[2], device=ends.device)
            pruned = self.c_at(first) - ends < threshold.double()[..., None]
            start = start + (pruned & (column >= start[..., None]) & (column < diagonal)).sum(-1)
        start_block.copy_(torch.minimum(start, diagonal[..., 0]))
