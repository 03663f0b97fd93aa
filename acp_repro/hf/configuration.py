"""``FoXConfig`` and ``FoXCache`` as the config and the cache of transformers."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from acp_repro.model import FoXCache, FoXConfig
from acp_repro.model.pretrained import MODEL_TYPE, config_from_official, config_to_official

# The ids in the authors' files. Training did not use them; in GPT-2's vocabulary they are "!" and '"'.
MEANINGLESS_IDS = (0, 1)
_GPT2_END_OF_TEXT = 50256
RIGHT_PADDING_ERROR = (
    "rows end with padding, so nothing can follow them: pad on the left (tokenizer.padding_side = 'left')"
)


class ForgettingTransformerConfig(PreTrainedConfig):
    """The fields of ``FoXConfig``, with the same defaults and errors, and the fields of transformers.

    Args:
        use_cache: return a cache, unless a call sets ``use_cache`` itself.
        bos_token_id, eos_token_id: the token that separates documents. The pair (0, 1) of the authors' files
            becomes GPT-2's 50256, or as None if the vocabulary is smaller.
        **kwargs: fields of ``FoXConfig`` and of ``PreTrainedConfig``.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "num_heads"}  # noqa: RUF012

    def __init__(
        self,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ):
        preset = FoXConfig.rope if kwargs.get("use_rope") else FoXConfig.pro
        fields = config_to_official(preset())
        fields.pop("model_type")
        kwargs.pop("model_type", None)
        if "num_attention_heads" in kwargs:
            kwargs["num_heads"] = kwargs.pop("num_attention_heads")
        for name, default in fields.items():
            setattr(self, name, kwargs.pop(name, default))
        fox = self.to_fox()
        if (bos_token_id, eos_token_id) == MEANINGLESS_IDS:
            bos_token_id = eos_token_id = _GPT2_END_OF_TEXT if fox.vocab_size > _GPT2_END_OF_TEXT else None
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        super().__init__(**kwargs)

    def to_fox(self) -> FoXConfig:
        """The ``FoXConfig`` with these fields."""
        return config_from_official({**vars(self), "model_type": MODEL_TYPE}, "the config")


class ForgettingTransformerCache(Cache):
    """The cache of a FoX model for ``past_key_values``. The model updates ``self.fox`` without ``update``.

    Args:
        config: the config of the model.
        max_cache_len: the maximum length in tokens; see ``FoXCache``.
    """

    is_compileable = False  # pyright: ignore[reportAssignmentType]  # properties there
    is_croppable = True  # pyright: ignore[reportAssignmentType]

    def __init__(self, config: ForgettingTransformerConfig, max_cache_len: int | None = None):
        super().__init__(layers=[])
        self.fox = FoXCache(config.num_hidden_layers, max_cache_len)
        self.right_padded = False  # whether cached rows end with padding, after which no token can follow
        self.shape = (config.num_hidden_layers, config.num_heads, config.hidden_size // config.num_heads)

    def __len__(self) -> int:
        return len(self.fox.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of cached tokens, including evicted ones."""
        return self.fox.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The maximum length in tokens; -1 if unlimited."""
        return -1 if self.fox.max_length is None else self.fox.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(length, offset) of the keys that ``query_length`` more tokens see."""
        return self.fox.length + query_length, 0

    @property
    def batch_size(self) -> int:
        """The number of cached rows; -1 before the first token."""
        return self.fox.batch_size

    @property
    def is_initialized(self) -> bool:
        """Whether the cache contains tokens."""
        return self.fox.length > 0

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a sliding window: always False."""
        return [False] * len(self)

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported, because the arguments contain no forget gates."""
        raise NotImplementedError("only a FoX model updates a ForgettingTransformerCache; do not call update")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces row i by row ``beam_idx[i]``; ``beam_idx`` is (B,) int64."""
        kept = torch.equal(beam_idx.cpu(), torch.arange(max(self.batch_size, 0)))
        if self.fox.length and not kept:
            self.fox = self.fox.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same as :meth:`reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row ``repeats`` times; the copies continue independently."""
        if self.fox.length:
            rows = torch.arange(self.batch_size).repeat_interleave(repeats)
            self.fox = self.fox.select_rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens; transformers passes a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop needs a negative number of tokens to remove, got {tokens_to_remove}")
        self.fox.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Records the state that ``crop`` needs, from the next token on."""
        self.fox.record_past()

    def reset(self) -> None:
        """Removes all tokens."""
        self.fox = FoXCache(len(self), self.fox.max_length)
        self.right_padded = False


def check_cache(cache: Any, config: ForgettingTransformerConfig) -> None:
    """Raises ValueError unless a model with ``config`` can continue from ``cache``."""
    if not isinstance(cache, ForgettingTransformerCache):
        raise ValueError(
            f"past_key_values must be a ForgettingTransformerCache, got {type(cache).__name__}: "
            "no other cache stores forget gates and token shifts"
        )
    if cache.shape != (shape := ForgettingTransformerCache(config).shape):
        raise ValueError(
            f"past_key_values is for a model with (layers, heads, head_dim) {cache.shape}, not "
            f"{shape}; create it with ForgettingTransformerCache(model.config)"
        )
    if cache.right_padded and cache.get_seq_length():
        raise ValueError(RIGHT_PADDING_ERROR)
