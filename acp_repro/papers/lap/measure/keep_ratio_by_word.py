"""The keep ratio of tokens by kind, by frequency, and by position in the text."""

import string
from collections import Counter
from typing import Any

import torch

from acp_repro.pipeline.paper import with_columns

from ..task import TrainedPruning

FREQUENCY_BANDS = 5
PLACES = 10
_PUNCTUATION = set(string.punctuation)


@with_columns("grouping", "group", "tokens", "kept_tokens")
def measure_keep_ratio_by_word(trained: TrainedPruning) -> list[dict[str, Any]]:
    """One record for each grouping and group, with the number of tokens and of kept tokens, without EOS.

    ``kind``: beginning of a word, inside of a word, number, or punctuation. ``frequency``: fifths of the
    held-out tokens by the frequency of their id in the training texts; 1 is the most frequent. ``place``:
    tenths of the text. ``token``: each of the hundred most frequent tokens.
    """
    tokenizer = trained.task.tokenizer
    frequency = Counter(i for row in trained.task.rows("train") for i in row[:-1])
    seen, kept = [], []
    rows = trained.heldout_rows(trained.measure_settings.scored_texts)
    for input_ids in trained.batches(rows):
        memory = trained.model.encode_ids(input_ids)
        for row, length, dropped in zip(
            input_ids.tolist(), memory.lengths.tolist(), memory.dropped_by.tolist(), strict=True
        ):
            seen += [(row[i], i / max(1, length - 1)) for i in range(length - 1)]
            kept += [dropped[i] < 0 for i in range(length - 1)]
    shown = {i: word for i, word in zip(frequency, tokenizer.tokens(frequency), strict=True)}
    shown |= {i: tokenizer.tokens([i])[0] for i, _ in seen if i not in shown}
    bands = _bands([i for i, _ in seen], frequency)
    common = {i for i, _ in Counter(i for i, _ in seen).most_common(100)}
    groups: dict[tuple[str, str], list[bool]] = {}
    for (token, place), stays in zip(seen, kept, strict=True):
        keys = [
            ("kind", kind_of(shown[token], first=place == 0)),
            ("frequency", str(bands[token])),
            ("place", str(min(PLACES, int(place * PLACES) + 1))),
        ]
        keys += [("token", shown[token])] if token in common else []
        for key in keys:
            groups.setdefault(key, []).append(stays)
    return [
        {
            "grouping": grouping,
            "group": repr(group) if grouping == "token" else group,
            "tokens": len(values),
            "kept_tokens": sum(values),
        }
        for (grouping, group), values in sorted(groups.items())
    ]


def kind_of(word: str, first: bool) -> str:
    """``word start``, ``word inside``, ``number`` or ``punctuation``.

    Args:
        first: whether the token begins the text, where no space precedes a word.
    """
    bare = word.strip()
    if bare and all(c in _PUNCTUATION for c in bare):
        return "punctuation"
    if bare and bare.isdecimal():
        return "number"
    return "word start" if first or word.startswith(" ") else "word inside"


def _bands(seen: list[int], frequency: Counter) -> dict[int, int]:
    """The fifth of each token id: ids are sorted by frequency, and all fifths contain equally many tokens."""
    counts = Counter(seen)
    ordered = sorted(counts, key=lambda i: (-frequency[i], i))
    ends = torch.tensor([counts[i] for i in ordered]).cumsum(0) / len(seen)
    return {
        i: min(FREQUENCY_BANDS, int(max(0.0, float(end) - 1e-9) * FREQUENCY_BANDS) + 1)
        for i, end in zip(ordered, ends, strict=True)
    }
