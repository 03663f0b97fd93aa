"""The tokenizer of LongCrawl64: GPT-2's, of text that is escaped as in JSON first."""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import GPT2Tokenizer

_GPT2_VOCAB_SIZE = 50257
_ESCAPES = re.compile(r'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')


def escape(text: str) -> str:
    r"""``text`` as it stands inside a JSON string: a line end reads ``\n``, é reads ``\u00e9``."""
    return json.dumps(text)[1:-1]


def unescape(text: str) -> str:
    """The inverse of :func:`escape`; an escape that is cut off at an end stays as it is."""
    text = _ESCAPES.sub(lambda run: json.loads(f'"{run[0]}"'), text)
    # Half of a surrogate pair is no character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class JSONGPT2Tokenizer(GPT2Tokenizer):
    """GPT-2's byte-level BPE over JSON-escaped text, as LongCrawl64 was tokenised. BOS, EOS and padding
    are ``<|endoftext|>``, id 50256, the token between its documents.

    Raises:
        ValueError: the files hold another vocabulary than GPT-2's.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("pad_token", "<|endoftext|>")
        super().__init__(*args, **kwargs)
        if len(self) != _GPT2_VOCAB_SIZE:
            raise ValueError(
                f"this tokenizer has {len(self)} ids, and GPT-2's, of which LongCrawl64 is made, "
                f"{_GPT2_VOCAB_SIZE}; for a folder of this project: "
                "python -m acp_repro.convert FOLDER OUT --to transformers"
            )

    def _encode_plus(self, text, text_pair=None, **kwargs):
        return super()._encode_plus(_each(text), None if text_pair is None else _each(text_pair), **kwargs)

    def _decode(self, token_ids, **kwargs) -> str:
        return unescape(super()._decode(token_ids, **kwargs))


def _each(text):
    """Escapes a text, or every text in lists of them."""
    return escape(text) if isinstance(text, str) else [_each(one) for one in text]
