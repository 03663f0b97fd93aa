"""What generation remembers: keys, values, log forget gates and the token shift's last inputs.

Buffers grow by doubling, so T tokens cost O(T) copying in all; a length known beforehand is allocated
once. Nothing is evicted: the threshold depends on the length so far, so a key that is pruned now may be
needed again later (Appendix F).
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_CAPACITY = 64


class LayerCache:
    """The memory of one attention layer. Filled by the layer; empty until its first call.

    Attributes:
        length: tokens held.
        logit_bound: U from the QK-norm weights, stored here by the layer, or None.
    """

    def __init__(self, max_length: int | None = None):
        self.length = 0
        self.record_past = False
        self._shift: dict[str, Tensor] = {}
        self.logit_bound: Tensor | None = None
        self._max_length = max_length
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        self._longest_key: Tensor | None = None
        self._longest_of = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit before the buffers have to grow."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first token."""
        return -1 if self._buffers is None else self._buffers[0].shape[0]

    def append(self, k: Tensor, v: Tensor, log_fgate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add T tokens; return all that is held, as views that the next call may overwrite.

        Args:
            k, v: (B, H, T, D).
            log_fgate: (B, H, T) float32.

        Returns:
            k, v: (B, H, length, D), log_fgate: (B, H, length).

        Raises:
            RuntimeError: when gradients are being recorded; a cache holds values, no graph.
            ValueError: when batch, heads, head_dim or dtype differ from what is held.
        """
        new = (k, v, log_fgate)
        if torch.is_grad_enabled() and any(x.requires_grad for x in new):
            raise RuntimeError("a FoXCache holds no gradients: call the model under torch.no_grad()")
        start, end = self.length, self.length + k.shape[2]
        self._reserve(end, new)
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, start:end] = x
        self.length = end
        k, v, log_fgate = (buffer[:, :, :end] for buffer in self._buffers)
        return k, v, log_fgate

    def longest_key(self, k: Tensor) -> Tensor:
        """(B, H, 1, D), per head the key of largest norm among those held.

        Only keys added since the last call are looked at.

        Args:
            k: (B, H, length, D), as ``append`` returned it.
        """
        candidates = k[:, :, self._longest_of :]
        if self._longest_key is not None:
            candidates = torch.cat((self._longest_key, candidates), dim=2)
        norms = torch.linalg.vector_norm(candidates, dim=-1, keepdim=True, dtype=torch.float32)
        index = norms.argmax(dim=2, keepdim=True).expand(-1, -1, 1, k.shape[-1])
        self._longest_key = candidates.gather(2, index)
        self._longest_of = k.shape[2]
        return self._longest_key

    def select_rows(self, rows: Tensor) -> LayerCache:
        """A copy whose row i is row ``rows[i]`` of this one; both go on independently.

        Args:
            rows: (B',) integer indices into the batch, on the device of what is held; may repeat.
        """
        copy = LayerCache(self._max_length)
        copy.record_past = self.record_past
        copy.length, copy.logit_bound, copy._longest_of = self.length, self.logit_bound, self._longest_of
        copy._shift = {name: z.index_select(0, rows) for name, z in self._shift.items()}
        if self._longest_key is not None:
            copy._longest_key = self._longest_key.index_select(0, rows)
        if self._buffers is not None:
            copy._buffers = tuple(x[:, :, : self.length].index_select(0, rows) for x in self._buffers)
        return copy

    def shift_state(self, name: str) -> Tensor | None:
        """(B, 1, H, D), the token shift's last input of ``name``, or None before the first token."""
        held = self._shift.get(name)
        return None if held is None else held[:, -1:]

    def keep_shift_state(self, name: str, z: Tensor) -> None:
        """Remember the inputs z (B, T, H, D) of the tokens that are added: the last one, or while
        ``record_past`` all since it was set, which :meth:`crop` needs."""
        if self.record_past and name in self._shift:
            z = torch.cat((self._shift[name], z), dim=1)
        self._shift[name] = z if self.record_past else z[:, -1:].clone()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``tokens_to_remove`` tokens.

        Raises:
            ValueError: more than are held, or the token shift's state of back then is not held.
        """
        if not 0 <= tokens_to_remove <= self.length:
            raise ValueError(f"cannot remove {tokens_to_remove} tokens from a cache of {self.length}")
        for name, z in self._shift.items():
            left = z.shape[1] - tokens_to_remove
            if left < 1 and tokens_to_remove:
                raise ValueError(
                    f"the token shift's state of {tokens_to_remove} tokens ago is not held: call "
                    "record_past() before the tokens that may be removed"
                )
            self._shift[name] = z[:, left - 1 : left].clone()
        self.length -= tokens_to_remove
        self._longest_of = min(self._longest_of, self.length)

    def _reserve(self, length: int, new: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._buffers is not None:
            for buffer, x in zip(self._buffers, new, strict=True):
                held, given = _signature(buffer), _signature(x)
                if held != given:
                    raise ValueError(
                        f"this cache holds (batch, heads, head_dim, dtype) {held}, got {given}:"
                        " continue with the same batch and dtype, or start a new FoXCache"
                    )
            if length <= self.capacity:
                return
        capacity = max(length, 2 * self.capacity, _FIRST_CAPACITY)
        if self._max_length is not None and length <= self._max_length:
            capacity = self._max_length
        grown = tuple(x.new_empty(*x.shape[:2], capacity, *x.shape[3:]) for x in new)
        for old, buffer in zip(self._buffers or (), grown, strict=False):
            buffer[:, :, : self.length] = old[:, :, : self.length]
        self._buffers = grown


def _signature(x: Tensor) -> tuple:
    return (*x.shape[:2], *x.shape[3:], x.dtype)


class FoXCache:
    """One ``LayerCache`` for each layer; pass it to every call of a model to go on where the last ended.

    Args:
        num_layers: attention layers of the model.
        max_length: tokens to allocate for at once; None starts small and doubles.
    """

    def __init__(self, num_layers: int, max_length: int | None = None):
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]
        self.seq_start: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.layers[-1].length

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first token."""
        return self.layers[-1].batch_size

    def record_past(self) -> None:
        """From the next token on, hold what :meth:`crop` needs of the token shift."""
        for layer in self.layers:
            layer.record_past = True

    def select_rows(self, rows: Tensor) -> FoXCache:
        """A copy whose row i is row ``rows[i]`` of this one: several continuations of one context.

        Args:
            rows: (B',) integer indices into the batch; may repeat.
        """
        copy = FoXCache(0)
        if self.seq_start is not None:
            copy.seq_start = self.seq_start.index_select(0, rows)
        copy.layers = [layer.select_rows(rows) for layer in self.layers]
        return copy

    def remember_start(self, seq_start: Tensor | None) -> Tensor | None:
        """Keep the first real token of left-padded rows, (B,) int64, from the first tokens on.

        Returns:
            What is remembered; None: no row is padded.

        Raises:
            ValueError: it is given again when tokens are held.
        """
        if seq_start is not None:
            if self.length:
                raise ValueError("seq_start is given with a cache's first tokens, and remembered")
            self.seq_start = seq_start
        return self.seq_start

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``tokens_to_remove`` tokens; raises as ``LayerCache.crop`` does."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)
