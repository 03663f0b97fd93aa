"""``FoXConfig`` as a config of transformers, with the keys of the authors' ``config.json``."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from acp_repro.model import FoXConfig
from acp_repro.model.pretrained import MODEL_TYPE, config_from_official, config_to_official

# The authors' files have these ids. Their training never used them, and in GPT-2 they are "!" and '"'.
MEANINGLESS_IDS = (0, 1)
_GPT2_END_OF_TEXT = 50256


class ForgettingTransformerConfig(PreTrainedConfig):
    """The fields of ``FoXConfig``, and those of transformers.

    Args:
        use_cache: keep a cache unless the call sets it otherwise.
        bos_token_id, eos_token_id: the token between documents. The pair 0 and 1 of the authors' files is
            read as GPT-2's 50256, or as None if the vocabulary is smaller.
        **kwargs: fields of ``FoXConfig``, with its defaults; keys of transformers.

    Raises:
        ValueError: ``FoXConfig`` does not allow a value, or FoX here does not have a feature.
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
        fields = config_to_official(FoXConfig())
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
        """The config of our own model.

        Raises:
            ValueError: ``FoXConfig`` does not allow it.
        """
        names = config_to_official(FoXConfig())
        return config_from_official({name: getattr(self, name) for name in names}, "the config")
