"""The memory of one attention layer: a pool of blocks of tokens that each head allocates and frees."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
from torch import Tensor

from acp_repro.attention import PagedKVCache, choose_implementation
from acp_repro.attention.backends import find_backend, kernels
from acp_repro.attention.decay import cumulative_log_fgate

# The key blocks of the pruning grid; the training forward keeps or skips whole blocks.
BLOCK_SIZE = 64
# A pool grows by at least this fraction of its size and by at least this many columns, because each growth
# copies the whole pool and requires a new CUDA graph.
_GROWTH, _SPARE_COLUMNS = 8, 4


class BlockPool:
    """Keys, values and decays of (batch, heads), in blocks of ``BLOCK_SIZE`` tokens.

    Physical block 0 belongs to no head, and table entries without a block point to it. Writes for tokens that
    no query will read therefore need no branch and have no effect.

    Args:
        k: (B, H, T, D), keys with the shape and dtype of all later keys.
        table: (B, H, N) int32, the blocks of the first columns: 0, or each of 1 to ``blocks`` once.
        start: (2, B, H) int32, the first values of the two attributes below.

    Attributes:
        first_resident_block: (B, H) int32, the first column of each head that has a block.
        first_read_block: (B, H) int32, the first column that a query reads.
    """

    def __init__(self, k: Tensor, table: Tensor, blocks: int, start: Tensor):
        self.batch, self.heads, self.columns = table.shape  # all heads use the same columns
        self.head_dim, self.dtype = k.shape[3], k.dtype
        self.version = 0  # incremented when storage moves, which requires a new CUDA graph
        # (B, H, N), the physical block of each column, and (n,), the free physical blocks.
        self.table = table
        self.first_resident_block, self.first_read_block = start
        self.free = self.k = self.v = self.c = table.new_empty(0, dtype=torch.int64)
        self.k, self.v, self.c = self._allocate(1 + blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values, decays."""
        return BLOCK_SIZE * (2 * self.head_dim * self.dtype.itemsize + torch.float64.itemsize)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pool and its table."""
        held = (self.k, self.v, self.c, self.table, self.free)
        return sum(x.numel() * x.element_size() for x in held)

    @property
    def resident_bytes(self) -> Tensor:
        """(B, H) int64, bytes of the blocks of each head."""
        return (self.columns - self.first_resident_block.long()) * self.block_bytes

    def signature(self) -> tuple:
        """(batch, heads, head_dim, dtype) of the stored tensors."""
        return self.batch, self.heads, self.head_dim, self.dtype

    def paged(self, seqlens: Tensor) -> PagedKVCache:
        """The pool as a cache for ``forgetting_attention_with_kvcache``; ``seqlens`` is (B,) int32."""
        return PagedKVCache(self.k, self.v, self.c, self.table, seqlens)

    def write(
        self, seqlens: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, c: Tensor | None = None
    ) -> None:
        """``PagedKVCache.write`` by the fastest way; ``c`` (B, H, T) is the :func:`running_sum`, if known."""
        write_pools(seqlens, [(self, k, v, log_fgate, c)])

    def allocate(self, columns: int, start: Tensor) -> None:
        """Allocates blocks of every head up to column ``columns``, except before its ``start`` (B, H) int32.

        Synchronises with the device once.
        """
        if columns <= self.columns:
            return
        nth, wanted = number_blocks(self.columns, columns, start)
        count = int(nth[-1, -1, -1])
        self._grow(count - len(self.free), columns)
        if count:
            # `table[wanted] = ...` would synchronise once more.
            blocks = self.free[(nth - 1).clamp_(min=0)].int()
            self.table[:, :, self.columns : columns] = torch.where(wanted, blocks, 0)
        self.free = self.free[count:]
        self.columns = columns

    def evict(self, start: Tensor) -> bool:
        """Frees the blocks of each head before ``start`` (B, H); returns whether there were any."""
        frees = bool((start > self.first_resident_block).any())
        self.first_resident_block.copy_(start)
        self.first_read_block.copy_(torch.maximum(self.first_read_block, self.first_resident_block))
        if not frees:
            return False
        column = torch.arange(self.columns, device=self.table.device)
        table = self.table[:, :, : self.columns]
        dropped = (column < start[..., None]) & (table != 0)
        blocks = table[dropped].long()
        table[dropped] = 0
        self.free = torch.cat((self.free, blocks))
        if len(self.free) > max(len(self.k) // 2, 2 * _SPARE_COLUMNS * self.batch * self.heads):
            self.rebuild(torch.arange(self.batch, device=self.table.device))
        return True

    def drop_columns(self, count: int) -> None:
        """Removes the first ``count`` columns, which no head uses."""
        self.table.copy_(self.table.roll(-count, 2))  # in place, because a CUDA graph may read the table
        self.columns -= count
        self.first_resident_block.sub_(count)
        self.first_read_block.sub_(count)

    def truncate(self, columns: int) -> None:
        """Frees the blocks of all columns from ``columns`` on; queries read all resident blocks again."""
        table = self.table[:, :, columns : self.columns]
        self.free = torch.cat((self.free, table[table != 0].long()))
        table.zero_()
        self.columns = min(self.columns, columns)
        self.first_read_block.copy_(self.first_resident_block)

    def rebuild(self, rows: Tensor) -> None:
        """Moves ``rows`` (B',) int64 of the batch to new storage of exactly these rows."""
        table = self.table.index_select(0, rows)
        held = table != 0
        blocks = torch.cat((table.new_zeros(1), table[held])).long()
        self.k, self.v, self.c = (x.index_select(0, blocks) for x in (self.k, self.v, self.c))
        table[held] = torch.arange(1, len(blocks), dtype=torch.int32, device=table.device)
        self.table, self.batch = table, len(rows)
        self.first_resident_block = self.first_resident_block.index_select(0, rows)
        self.first_read_block = self.first_read_block.index_select(0, rows)
        self.free = self.free[:0]
        self.version += 1

    def select_rows(self, rows: Tensor) -> BlockPool:
        """A separate pool whose row i is row ``rows[i]`` of this one; ``rows`` is (B',) int64."""
        other = copy.copy(self)
        other.rebuild(rows)
        return other

    def end_decays(self, c_new: Tensor, length: int) -> Tensor:
        """(B, H, N): c at the last token of each column that ends before the newest token.

        ``c_new`` (B, H, T) is not written yet, and ``length`` tokens are.
        """
        old = self.c[self.table[:, :, : length // BLOCK_SIZE].long(), 0, -1]
        # The column of token `length - 1` is completed by the new tokens, unless it was full.
        return torch.cat((old, column_ends(c_new, length)), -1)

    def gather(self, length: int, rows: slice) -> tuple[Tensor, Tensor, Tensor, int]:
        """k, v (rows, H, n, D) and log_fgate (rows, H, n) of the resident tokens, and the first position.

        A head with fewer tokens than the others is padded in front with zeros, which a gate of 0 hides.
        """
        start = self.first_resident_block[rows]
        low = int(start.min()) if self.columns else 0
        blocks = self.table[rows, :, low : self.columns].long()
        real = slice(0, length - low * BLOCK_SIZE)
        k, v = (x[blocks].flatten(2, 3)[:, :, real] for x in (self.k, self.v))
        c = self.c[blocks, 0].flatten(2)[:, :, real]
        column = torch.arange(low * BLOCK_SIZE, length, device=c.device)
        first = (start.long() * BLOCK_SIZE)[..., None]
        gates = c.diff(dim=-1, prepend=c[..., :1]).masked_fill(column < first, 0.0)
        cut = (column == first) & (first > low * BLOCK_SIZE)
        return k, v, gates.float().masked_fill(cut, float("-inf")), low * BLOCK_SIZE

    def _allocate(self, size: int) -> list[Tensor]:
        """Storage of ``size`` blocks for k, v and c."""
        keys, c = ((size, BLOCK_SIZE, self.head_dim), self.dtype), ((size, 1, BLOCK_SIZE), torch.float64)
        try:
            return [self.free.new_empty(shape, dtype=dtype) for shape, dtype in (keys, keys, c)]
        except torch.OutOfMemoryError as error:
            missing = size - len(self.k)
            raise torch.OutOfMemoryError(
                f"the cache needs {missing * self.block_bytes / 2**20:.0f} MiB more in one layer, for "
                f"{self.batch} rows, beside {self.allocated_bytes / 2**20:.0f} MiB: take fewer rows"
            ) from error

    def _grow(self, missing: int, columns: int) -> None:
        capacity = self.table.shape[2]
        if missing > 0:
            blocks = len(self.k)
            size = blocks + max(missing, _SPARE_COLUMNS * self.batch * self.heads, blocks // _GROWTH)
            for name, grown in zip("kvc", self._allocate(size), strict=True):
                grown[:blocks] = getattr(self, name)
                setattr(self, name, grown)
            self.free = torch.cat((self.free, torch.arange(blocks, size, device=self.free.device)))
            self.version += 1
        if columns > capacity:
            table = self.table.new_zeros((self.batch, self.heads, max(columns, 2 * capacity)))
            table[:, :, :capacity] = self.table
            self.table = table
            self.version += 1


def write_pools(seqlens: Tensor, tokens: list[tuple]) -> None:
    """:meth:`BlockPool.write` to several pools: a pool and its k, v, log_fgate and c each."""
    if _has_kernels(seqlens):
        # One block stands for all, so that pools of all sizes share one recorded pass.
        each = [(*new, pool.k[:1], pool.v[:1], pool.c[:1], pool.table) for pool, *new in tokens]
        _repeated_write()(seqlens, *itertools.chain(*each), ())
    else:
        for pool, k, v, log_fgate, _ in tokens:
            find_backend(choose_implementation(k.device)).write(pool.paged(seqlens), k, v, log_fgate)


@functools.cache
def _repeated_write():
    """:func:`_write_all`, whose launches are repeated."""
    return kernels().repeat_launches(_write_all)


def _write_all(seqlens, *tensors):
    """``write_kvcache`` to several caches; ``tensors`` are k, v, log_fgate, c and those of each cache."""
    for n in range(0, len(tensors) - 1, 8):
        kernels().write_kvcache(PagedKVCache(*tensors[n + 4 : n + 8], seqlens=seqlens), *tensors[n : n + 4])
    return ()


def number_blocks(first: int, columns: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """For columns ``first .. columns``, (..., B, H, N) each: the cumulative number of wanted columns, int32,
    and the mask of wanted columns, which begin at each head's ``start`` (..., B, H)."""
    wanted = torch.arange(first, columns, device=start.device) >= start[..., None]
    return wanted.flatten(-3).cumsum(-1, dtype=torch.int32).view(wanted.shape), wanted


def column_ends(c: Tensor, length: int) -> Tensor:
    """(..., N): c (..., T) of the tokens after ``length`` at each end of a column before the newest one."""
    return c[..., BLOCK_SIZE - 1 - length % BLOCK_SIZE : -1 : BLOCK_SIZE]


def join_pools(parts: list[BlockPool]) -> BlockPool:
    """One pool with the rows of all ``parts``, whose tables have the same number of columns."""
    joint = copy.copy(parts[0])
    # The joined pool needs only one unused block 0.
    before = itertools.accumulate((len(part.k) - 1 for part in parts), initial=0)
    pairs = list(zip(parts, before, strict=False))
    joint.table = torch.cat([torch.where(part.table == 0, 0, part.table + n) for part, n in pairs])
    joint.free = torch.cat([part.free + n for part, n in pairs])
    joint.batch = len(joint.table)
    joint.first_resident_block = torch.cat([part.first_resident_block for part in parts])
    joint.first_read_block = torch.cat([part.first_read_block for part in parts])
    for name in ("k", "v", "c"):
        held = [getattr(part, name) for part in parts]
        setattr(joint, name, torch.cat([held[0], *(x[1:] for x in held[1:])]))
    return joint


def running_sum(log_fgate: Tensor) -> Tensor:
    """(B, H, T) float64: c of the tokens, summed from the first of them."""
    compute = kernels().cumulative_log_fgate if _has_kernels(log_fgate) else cumulative_log_fgate
    return compute(log_fgate)


def _has_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels run on ``x``: on a GPU, outside of compiled code."""
    return choose_implementation(x.device) == "triton" and not torch.compiler.is_compiling()
