"""Shows a text with its dropped tokens marked by gate, for a terminal."""

from __future__ import annotations

from itertools import islice

from .autoencoder import PruningAutoencoder
from .memory import Memory

KEPT = "kept"


def legend(colour: bool) -> str:
    """What the marks of :func:`marked` mean."""
    if colour:
        return "\033[1mbold\033[0m: kept; \033[90mgrey\033[0m: dropped; a word may be several tokens"
    return "[word]2: a token that gate 2 dropped; the others are kept; a word may be several tokens"


def marked(model: PruningAutoencoder, memory: Memory, row: int, colour: bool) -> str:
    """The tokens of one text, kept ones plain and dropped ones marked.

    Tokens that share a character are marked as one, by the first gate that dropped any of them.

    Args:
        colour: kept tokens bold and dropped ones grey. Otherwise a dropped token is ``[token]1``, with its
            gate counted from 1.
    """
    length = int(memory.lengths[row]) - 1  # EOS is always kept
    ids = memory.input_ids[row, :length].tolist()
    parts = []
    gates = iter(memory.dropped_by[row].tolist())
    for token, count in model.tokenizer.characters(ids):
        gate = min((gate for gate in islice(gates, count) if gate >= 0), default=-1)
        space, word = (" ", token[1:]) if token.startswith(" ") else ("", token)
        if colour:
            parts.append(f"{space}\033[1m{word}\033[0m" if gate < 0 else f"{space}\033[90m{word}\033[0m")
        else:
            parts.append(f"{space}{word}" if gate < 0 else f"{space}[{word}]{gate + 1}")
    return "".join(parts)


def by_gate(model: PruningAutoencoder, memory: Memory, row: int) -> list[tuple[str, list[str]]]:
    """(where, tokens): what each gate drops, then what is kept, EOS included; in the order of the text."""
    length = int(memory.lengths[row])
    tokens = model.tokenizer.tokens(memory.input_ids[row, :length].tolist())
    gates = memory.dropped_by[row, :length].tolist()
    named = [(f"gate {gate + 1} drops", gate) for gate in range(memory.gates)] + [(KEPT, -1)]
    return [(name, [t for t, g in zip(tokens, gates, strict=True) if g == wanted]) for name, wanted in named]
