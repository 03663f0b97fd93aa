"""Checks before a model is evaluated: its tokeniser, and memory for a sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from acp_repro.common.errors import UserError, is_out_of_memory

PADDED_IDS = 256  # a model may have this many more ids than its tokeniser, to round their number up


class OtherTokenizer(UserError, ValueError):
    """The tokeniser's ids are not the model's."""


class TooLong(UserError, ValueError):
    """A sequence does not fit: into the model's context, or into memory."""


def check_tokenizer(tokenizer_ids: int, model_ids: int, whose: str) -> None:
    """Checks that a tokeniser can be the model's.

    Raises:
        OtherTokenizer: it has more ids than the model, or fewer than rounding up explains.
    """
    if not 0 <= model_ids - tokenizer_ids < PADDED_IDS:
        raise OtherTokenizer(
            f"{whose}: the model has {model_ids} token ids and the tokenizer {tokenizer_ids}, so it "
            "is not the model's; give the tokenizer.json that the model was trained with"
        )


@contextlib.contextmanager
def enough_memory(length: int) -> Iterator[None]:
    """Turns running out of memory into one line.

    Raises:
        TooLong: the code inside needed more memory than there is.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise TooLong(
            f"a context of {length} tokens does not fit in this machine's memory; use a shorter one"
        ) from None
