"""The memory of one attention layer: a pool of blocks of tokens that each head allocates and frees."""

from __future__ import annotations

import torch
from torch import Tensor

from acp_repro.attention import PagedKVCache, choose_implementation
from acp_repro.attention.backends import find_backend, kernels
from acp_repro.attention.decay import LOG_FGATE_FLOOR

# The key blocks of the pruning grid, which the forward of training keeps or skips as a whole.
BLOCK_SIZE = 64
# A pool grows by at least this part of itself, and by at least this many columns, so that it grows rarely.
# Each growth copies all that it holds, and a CUDA graph is captured again.
_GROWTH, _SPARE_COLUMNS = 8, 4


class BlockPool:
    """Keys, values and decays of (batch, heads), in blocks of ``BLOCK_SIZE`` tokens.

    Physical block 0 belongs to no head. Table entries without a block point there. Writes for tokens that no
    query will read therefore need no branch and have no effect. ``k`` (B, H, T, D) has the shapes and the
    dtype of later tensors.
    """

    def __init__(self, k: Tensor):
        self.batch, self.heads, _, self.head_dim = k.shape
        self.columns = 0  # of the table in use; the same for all heads
        self.version = 0  # raised when storage moves, so that a CUDA graph is captured again
        # (B, H, N), the physical block of each column, and (n,), the physical blocks that no head holds.
        self.table = torch.zeros((self.batch, self.heads, 1), dtype=torch.int32, device=k.device)
        self.free = torch.empty(0, dtype=torch.int64, device=k.device)
        self.k, self.v = (k.new_zeros((1, BLOCK_SIZE, self.head_dim)) for _ in range(2))
        self.c = torch.zeros((1, 1, BLOCK_SIZE), dtype=torch.float64, device=k.device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values, decays."""
        return BLOCK_SIZE * (2 * self.head_dim * self.k.element_size() + self.c.element_size())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pool and its table."""
        held = (self.k, self.v, self.c, self.table, self.free)
        return sum(x.numel() * x.element_size() for x in held)

    @property
    def _spare(self) -> int:
        return _SPARE_COLUMNS * self.batch * self.heads

    def signature(self) -> tuple:
        """(batch, heads, head_dim, dtype) of the stored tensors."""
        return self.batch, self.heads, self.head_dim, self.k.dtype

    def paged(self, seqlens: Tensor) -> PagedKVCache:
        """The pool as a cache for ``forgetting_attention_with_kvcache``; ``seqlens`` is (B,) int32."""
        return PagedKVCache(self.k, self.v, self.c, self.table, seqlens)

    def write(
        self, seqlens: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, c: Tensor | None = None
    ) -> None:
        """``PagedKVCache.write`` by the fastest way; ``c`` (B, H, T) is the :func:`running_sum`, if known."""
        paged = self.paged(seqlens)
        if c is not None and _has_kernels(k):
            kernels().write_kvcache(paged, k, v, log_fgate, c)
        else:
            find_backend(choose_implementation(k.device)).write(paged, k, v, log_fgate)

    def take(self, columns: int, start: Tensor) -> bool:
        """Allocates blocks of every head up to column ``columns``, except before its ``start`` (B, H) int32.

        Waits for the device once. Returns whether a head has a new column without a block.
        """
        if columns <= self.columns:
            return False
        column = torch.arange(self.columns, columns, device=self.table.device)
        wanted = column >= start[..., None]  # (B, H, new)
        # The count of blocks up to each; and not `table[wanted] = ...`, which would wait for another count.
        nth = wanted.flatten().cumsum(0).view(wanted.shape)
        count = int(nth[-1, -1, -1])
        self._grow(count - len(self.free), columns)
        if count:
            blocks = self.free[(nth - 1).clamp_(min=0)].int()
            self.table[:, :, self.columns : columns] = torch.where(wanted, blocks, 0)
        self.free = self.free[count:]
        self.columns = columns
        return count < wanted.numel()

    def give_back(self, start: Tensor) -> None:
        """Returns each head's blocks before ``start`` (B, H) int32 to the pool."""
        column = torch.arange(self.columns, device=self.table.device)
        table = self.table[:, :, : self.columns]
        dropped = (column < start[..., None]) & (table != 0)
        blocks = table[dropped].long()
        table[dropped] = 0
        self.free = torch.cat((self.free, blocks))
        if len(self.free) > max(len(self.k) // 2, 2 * self._spare):
            self.rebuild(torch.arange(self.batch, device=self.table.device))

    def drop_columns(self, count: int) -> None:
        """Drops the first ``count`` columns, which no head uses."""
        self.table.copy_(self.table.roll(-count, 2))  # in place, for a CUDA graph that reads it
        self.columns -= count

    def truncate(self, columns: int) -> None:
        """Returns the blocks of all columns from ``columns`` on."""
        table = self.table[:, :, columns : self.columns]
        self.free = torch.cat((self.free, table[table != 0].long()))
        table.zero_()
        self.columns = min(self.columns, columns)

    def rebuild(self, rows: Tensor) -> None:
        """Moves ``rows`` (B',) int64 of the batch to new storage of exactly these rows."""
        table = self.table.index_select(0, rows)
        held = table != 0
        blocks = torch.cat((table.new_zeros(1), table[held])).long()
        self.k, self.v, self.c = (x.index_select(0, blocks) for x in (self.k, self.v, self.c))
        table[held] = torch.arange(1, len(blocks), dtype=torch.int32, device=table.device)
        self.table, self.batch = table, len(rows)
        self.free = self.free[:0]
        self.version += 1

    def select_rows(self, rows: Tensor) -> BlockPool:
        """A separate pool whose row i is row ``rows[i]`` of this one; ``rows`` is (B',) int64."""
        copy = object.__new__(BlockPool)
        copy.__dict__.update(self.__dict__)
        copy.rebuild(rows)
        return copy

    def end_decays(self, c_new: Tensor, length: int, columns: int) -> Tensor:
        """(B, H, columns): c at each column's last token; ``c_new`` (B, H, T) is not written yet."""
        old = self.c[self.table[:, :, : self.columns].long(), 0, -1]
        # The column that holds token `length - 1` ends among the new tokens, unless it was full.
        first_new = length // BLOCK_SIZE
        last = torch.arange(first_new, columns, device=c_new.device) * BLOCK_SIZE + (BLOCK_SIZE - 1) - length
        new = c_new[..., last.clamp(max=c_new.shape[2] - 1)]
        return torch.cat((old[..., :first_new], new), -1)

    def gather(self, start: Tensor, length: int, rows: slice) -> tuple[Tensor, Tensor, Tensor, int]:
        """k, v (rows, H, n, D), log_fgate (rows, H, n) from ``start`` (rows, H) on, and the first position.

        A head with fewer tokens than the others has zeros in front. A gate of 0 hides them.
        """
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

    def _grow(self, missing: int, columns: int) -> None:
        capacity = self.table.shape[2]
        if missing > 0:
            # The first call is a prefill, which takes just the blocks that it keeps.
            more = missing if self.columns == 0 else max(missing, self._spare, len(self.k) // _GROWTH)
            size = len(self.k) + more
            try:
                grown = [x.new_empty((size, *x.shape[1:])) for x in (self.k, self.v, self.c)]
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"the cache needs {missing * self.block_bytes / 2**20:.0f} MiB more in one layer, for "
                    f"{self.batch} rows, beside {self.allocated_bytes / 2**20:.0f} MiB: take fewer rows"
                ) from error
            for new, old in zip(grown, (self.k, self.v, self.c), strict=True):
                new[: len(old)] = old
            added = torch.arange(len(self.k), size, device=self.free.device)
            self.k, self.v, self.c = grown
            self.free = torch.cat((self.free, added))
            self.version += 1
        if columns > capacity:
            table = self.table.new_zeros((self.batch, self.heads, max(columns, 2 * capacity)))
            table[:, :, :capacity] = self.table
            self.table = table
            self.version += 1


def join_pools(parts: list[BlockPool]) -> BlockPool:
    """One pool of the rows of all, whose tables have as many columns."""
    joint = object.__new__(BlockPool)
    joint.__dict__.update(parts[0].__dict__)
    tables, free, before = [], [], 0
    for part in parts:
        tables.append(torch.where(part.table == 0, 0, part.table + before))
        free.append(part.free + before)
        before += len(part.k) - 1  # of block 0, which is nobody's, one is enough
    joint.table, joint.free = torch.cat(tables), torch.cat(free)
    joint.batch = len(joint.table)
    for name in ("k", "v", "c"):
        held = [getattr(part, name) for part in parts]
        setattr(joint, name, torch.cat([held[0], *(x[1:] for x in held[1:])]))
    return joint


def running_sum(log_fgate: Tensor, before: Tensor) -> Tensor:
    """(B, H, T) float64: c of new tokens; ``before`` (B, H, 1) is c of the token before them."""
    if _has_kernels(log_fgate):
        return before + kernels().cumulative_log_fgate(log_fgate)
    return before + log_fgate.double().clamp(min=LOG_FGATE_FLOOR).cumsum(-1)


def _has_kernels(x: Tensor) -> bool:
    """Whether our kernels run on ``x``. Compiled code has its own kernels, and cannot look into ours."""
    return choose_implementation(x.device) == "triton" and not torch.compiler.is_compiling()
