"""The tokenizers of FoX models: one for a ``tokenizer.json``, and one for LongCrawl64.

Both prepend BOS to a text, because every training sequence began with BOS; ``add_special_tokens=False`` omits
BOS.
"""

import json
import re
from typing import Any

from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

# BOS, EOS and padding. A ``tokenizer.json`` without it, such as this project's, assigns it the next id.
END_OF_TEXT = "<|endoftext|>"
_GPT2_VOCAB_SIZE = 50257
_ESCAPES = re.compile(r'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')


def escape(text: str) -> str:
    r"""``text`` escaped as in a JSON string: a line end becomes ``\n``, é becomes ``\u00e9``."""
    return json.dumps(text)[1:-1]


def unescape(text: str) -> str:
    """The inverse of :func:`escape`; an incomplete escape at either end is kept unchanged."""
    text = _ESCAPES.sub(lambda run: json.loads(f'"{run[0]}"'), text)
    # Half of a surrogate pair is not a character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class FoXTokenizer(PreTrainedTokenizerFast):
    """The ``tokenizer.json`` next to a model's weights, unchanged; BOS, EOS and padding are END_OF_TEXT."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any):
        if not (kwargs.get("tokenizer_file") or kwargs.get("tokenizer_object")):
            raise ValueError(
                f"{kwargs.get('name_or_path') or 'the folder'} has no tokenizer.json; copy the model's, "
                "or convert a byte-level model: python -m acp_repro.convert FOLDER OUT --to transformers"
            )
        super().__init__(*args, **_add_ends(kwargs))

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """Passes the whole file to ``__init__``; transformers would pass only its vocabulary and merges."""
        return kwargs


class JSONGPT2Tokenizer(GPT2Tokenizer):
    """GPT-2's byte-level BPE over JSON-escaped text, as LongCrawl64 was tokenised, with END_OF_TEXT 50256."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **_add_ends(kwargs))
        if len(self) != _GPT2_VOCAB_SIZE:
            raise ValueError(
                f"this tokenizer has {len(self)} ids, but GPT-2's, which tokenised LongCrawl64, has "
                f"{_GPT2_VOCAB_SIZE}; copy GPT-2's tokenizer.json there"
            )

    def _encode_plus(self, text, text_pair=None, **kwargs):
        return super()._encode_plus(
            _escape_all(text), None if text_pair is None else _escape_all(text_pair), **kwargs
        )

    def _decode(self, token_ids, **kwargs) -> str:
        return unescape(super()._decode(token_ids, **kwargs))


def _add_ends(kwargs: dict[str, Any]) -> dict[str, Any]:
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return {**ends, "add_bos_token": True, **kwargs}


def _escape_all(text):
    """Escapes a text, or every text in lists of them."""
    return escape(text) if isinstance(text, str) else [_escape_all(one) for one in text]
