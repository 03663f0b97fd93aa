"""Tokens as text that can be read, although a token may end within a character."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

HALF = "\ufffd"  # what a tokenizer gives for bytes that are not a character
MOST_PARTS = 8  # tokens over which a character is looked for; one has four bytes, but a token may end two


def whole_characters(tokens: Sequence[int], read: Callable[..., str]) -> Iterator[tuple[str, int]]:
    """(text, number of tokens): as few tokens as end with a character, or one where none of the next do.

    Args:
        read: the text of some tokens, each an argument.
    """
    at = 0
    while at < len(tokens):
        parts = (tokens[at : at + n] for n in range(1, min(MOST_PARTS, len(tokens) - at) + 1))
        whole = next((part for part in parts if HALF not in read(*part)), tokens[at : at + 1])
        yield read(*whole), len(whole)
        at += len(whole)
