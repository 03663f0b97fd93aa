"""``FoXCache`` as a ``Cache`` of transformers, with all that its ``generate`` needs, from greedy to beam
search."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from acp_repro.model import FoXCache

from .configuration import ForgettingTransformerConfig


class ForgettingTransformerCache(Cache):
    """A cache to pass as ``past_key_values``. The model fills ``self.fox`` itself, so ``update`` is not used.

    Args:
        config: of the model that will fill it.
        max_cache_len: the longest length allowed, in tokens; see ``FoXCache``.

    Attributes:
        right_padded: whether the tokens held end with padding, so that nothing can follow them.
    """

    def __init__(self, config: ForgettingTransformerConfig, max_cache_len: int | None = None):
        super().__init__(layers=[])
        self.fox = FoXCache(config.num_hidden_layers, max_cache_len)
        self.right_padded = False
        self._shape = _shape(config)
        self._max_length = max_cache_len

    def check_model(self, config: ForgettingTransformerConfig) -> None:
        """Raises ValueError unless the cache was made for models of this shape."""
        if self._shape != _shape(config):
            raise ValueError(
                f"past_key_values is of another model: (layers, heads, head_dim) {self._shape}, this one has "
                f"{_shape(config)}; make it with ForgettingTransformerCache(model.config)"
            )

    def __len__(self) -> int:
        return len(self.fox.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, evicted ones included."""
        return self.fox.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest length allowed, in tokens; -1 for any."""
        return -1 if self._max_length is None else self._max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(length, offset) of the keys that ``query_length`` more tokens see."""
        return self.fox.length + query_length, 0

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first token."""
        return self.fox.batch_size

    is_compileable = False
    is_croppable = True

    @property
    def is_initialized(self) -> bool:
        """Whether it holds tokens."""
        return self.fox.length > 0

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a sliding window; no layer has."""
        return [False] * len(self)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Not supported, because this signature has no forget gates.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("only its FoX model fills a ForgettingTransformerCache; do not call update")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was; ``beam_idx`` is (B,) int64."""
        kept = torch.equal(beam_idx.cpu(), torch.arange(max(self.batch_size, 0)))
        if self.fox.length and not kept:
            self.fox = self.fox.select_rows(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes ``repeats`` rows that continue separately."""
        if self.fox.length:
            rows = torch.arange(self.batch_size).repeat_interleave(repeats)
            self.fox = self.fox.select_rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens (transformers counts them below 0).

        Raises:
            ValueError: the number is above 0, or the tokens cannot be removed; see ``FoXCache.crop``.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop needs the tokens to remove as a number below 0, got {tokens_to_remove}")
        self.fox.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """From the next token on, keeps what ``crop`` needs."""
        self.fox.record_past()

    def reset(self) -> None:
        """Removes all tokens."""
        self.fox = FoXCache(len(self), self._max_length)
        self.right_padded = False


def _shape(config: ForgettingTransformerConfig) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.num_heads, config.hidden_size // config.num_heads
