"""The test's prompts, token by token (Kamradt 2023; the easy mode of Lin et al. 2025), and its scores."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from acp_repro.common.errors import UsageError

Encode = Callable[[str], np.ndarray]
_QUESTION = "What is the best thing to do in San Francisco?"
_LEAD = "The best thing to do in San Francisco is"
_DEED = "eat a sandwich and sit in Dolores Park on a sunny day"
# Words that any English text has are no sign that the needle was found.
_COMMON = {"a", "and", "in", "on", "the", "to", "is"}


@dataclass(frozen=True)
class Wording:
    """What is hidden, what is asked at the end of the prompt, and how the right answer goes on from there."""

    needle: str
    question: str
    answer: str


WORDINGS = {
    # The needle holds the question too, and the prompt begins the answer: for models that only continue.
    "easy": Wording(
        f"\n{_QUESTION} Answer: {_LEAD} {_DEED}.\n", f"\n{_QUESTION} Answer: {_LEAD}", f" {_DEED}."
    ),
    # The needle is a statement, and the whole answer is the model's.
    "standard": Wording(f"\n{_LEAD} {_DEED}.\n", f"\n{_QUESTION} Answer:", f" {_LEAD} {_DEED}."),
}


@dataclass(frozen=True)
class Needle:
    """A wording as token ids of one tokeniser; see :func:`tokenise_needle`."""

    needle: np.ndarray
    question: np.ndarray
    answer: np.ndarray
    full_stop: np.ndarray
    bos_id: int

    @property
    def room(self) -> int:
        """Tokens kept for the model's answer at the end of a context: the right answer, and half as much."""
        return len(self.answer) + len(self.answer) // 2

    def haystack_tokens(self, length: int) -> int:
        """Tokens of haystack in a context of ``length``, with BOS, needle, question and answer.

        Raises:
            UsageError: there would be none.
        """
        left = length - 1 - len(self.needle) - len(self.question) - self.room
        if left < 1:
            raise UsageError(
                f"needle: a context of {length} tokens holds no haystack: needle, question and answer take "
                f"{length - left}; use a length of at least {length - left + 1}"
            )
        return left

    def prompt(self, haystack: np.ndarray, length: int, depth: float | None) -> np.ndarray:
        """BOS, the haystack with the needle in it, and the question.

        The needle goes in after ``depth`` of the haystack's tokens, and from there back to behind the last
        full stop, if there is one.

        Args:
            haystack: (N,) token ids, of which as many are taken as fit.
            length: of the whole context, the answer's room included.
            depth: 0 is before the haystack, 1 behind it; None leaves the needle out, and nothing else.

        Returns:
            (T,) int64; the same T for every depth.

        Raises:
            UsageError: the haystack is shorter than the context.
        """
        size = self.haystack_tokens(length)
        if len(haystack) < size:
            raise UsageError(
                f"needle: the haystack has {len(haystack)} tokens, and a context of {length} takes {size}; "
                "give a longer text, or shorter lengths"
            )
        hay = np.asarray(haystack[:size], np.int64)
        parts = [[self.bos_id], hay, self.question]
        if depth is not None:
            place = self._place(hay, depth)
            parts[1:2] = [hay[:place], self.needle, hay[place:]]
        return np.concatenate([np.asarray(part, np.int64) for part in parts])

    def _place(self, hay: np.ndarray, depth: float) -> int:
        place = round(depth * len(hay))
        if place == len(hay):
            return place
        stops = np.flatnonzero(np.isin(hay[:place], self.full_stop))
        return int(stops[-1]) + 1 if len(stops) else place


def tokenise_needle(encode: Encode, bos_id: int, mode: str = "easy") -> Needle:
    """A wording in a model's own tokens.

    Raises:
        UsageError: no such mode.
    """
    if mode not in WORDINGS:
        raise UsageError(f"needle: mode {mode!r} is not known; use {' or '.join(WORDINGS)}")
    wording = WORDINGS[mode]
    needle, question, answer = (
        np.asarray(encode(text), np.int64) for text in (wording.needle, wording.question, wording.answer)
    )
    return Needle(needle, question, answer, np.asarray(encode("."), np.int64)[-1:], bos_id)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def first_line(text: str) -> str:
    """What counts of a continuation: its first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def recall(answer: str) -> float:
    """The share of the needle's words (less those of any text) that the answer has, 0 to 1."""
    wanted = set(_words(_DEED)) - _COMMON
    return len(wanted & set(_words(first_line(answer)))) / len(wanted)


def is_exact(answer: str) -> bool:
    """Whether the answer says what the needle says, word for word and then no more."""
    said, right = _words(first_line(answer)), _words(_DEED)
    return said[-len(right) :] == right and (len(said) == len(right) or said == _words(f"{_LEAD} {_DEED}"))
