"""The test's prompts, token by token (Kamradt 2023; the easy mode of Lin et al. 2025), and its scores."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from acp_repro.common.errors import UsageError

from .facts import FACTS

Encode = Callable[[str], np.ndarray]
# Words of any English text do not show that the needle was retrieved.
_COMMON = {"a", "and", "at", "in", "of", "on", "the", "to", "is"}


@dataclass(frozen=True)
class Wording:
    """The hidden sentence, the question at the end of the prompt, and the continuation that is the right
    answer.

    ``lead`` and ``deed`` are the two halves of the hidden sentence; the model must retrieve the deed.
    """

    needle: str
    question: str
    answer: str
    lead: str
    deed: str

    def recall(self, answer: str) -> float:
        """The fraction (0 to 1) of the deed's words, without common words, that the answer contains."""
        wanted = set(_words(self.deed)) - _COMMON
        return len(wanted & set(_words(first_line(answer)))) / len(wanted)

    def is_exact(self, answer: str) -> bool:
        """Whether the answer repeats the needle word for word and then ends."""
        said, right = _words(first_line(answer)), _words(self.deed)
        return said[-len(right) :] == right and (
            len(said) == len(right) or said == _words(f"{self.lead} {self.deed}")
        )


def easy(question: str, lead: str, deed: str) -> Wording:
    """A wording for models that only continue text: the needle contains the question, and the prompt contains
    the beginning of the answer."""
    return Wording(
        f"\n{question} Answer: {lead} {deed}.\n", f"\n{question} Answer: {lead}", f" {deed}.", lead, deed
    )


def standard(question: str, lead: str, deed: str) -> Wording:
    """A wording whose needle is a statement; the model generates the whole answer."""
    return Wording(f"\n{lead} {deed}.\n", f"\n{question} Answer:", f" {lead} {deed}.", lead, deed)


WORDINGS = {
    "easy": (easy(*FACTS[0]),),
    "standard": (standard(*FACTS[0]),),
    "facts": tuple(easy(*fact) for fact in FACTS),
}


@dataclass(frozen=True)
class Needle:
    """A wording as token ids of one tokenizer; see :func:`tokenise_needles`."""

    needle: np.ndarray
    question: np.ndarray
    answer: np.ndarray
    full_stop: np.ndarray
    bos_id: int
    wording: Wording

    @property
    def room(self) -> int:
        """Tokens reserved for the answer at the end of a context: 1.5 times the right answer."""
        return len(self.answer) + len(self.answer) // 2

    def haystack_tokens(self, length: int) -> int:
        """The tokens of haystack in a context of ``length``, without BOS, needle, question and answer."""
        left = length - 1 - len(self.needle) - len(self.question) - self.room
        if left < 1:
            raise UsageError(
                f"needle: a context of {length} tokens has no room for a haystack, because needle, question "
                f"and answer take {length - left} tokens; use a length of at least {length - left + 1}"
            )
        return left

    def prompt(self, haystack: np.ndarray, length: int, depth: float | None) -> np.ndarray:
        """The prompt (T,) int64, with the same T for every depth: BOS, the beginning of the haystack with the
        needle inserted, and the question.

        The needle follows the last full stop before the fraction ``depth`` of the haystack, or is at this
        position if there is no full stop. None omits only the needle. ``length`` is the length of the whole
        context, including the tokens reserved for the answer.
        """
        size = self.haystack_tokens(length)
        assert len(haystack) >= size, f"a haystack of {len(haystack)} tokens for a context of {length}"
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


class Trial(NamedTuple):
    """A needle and its haystack, with the index of each."""

    fact: int
    needle: Needle
    haystack_sample: int
    haystack: np.ndarray


def tokenise_needles(encode: Encode, bos_id: int, mode: str = "easy") -> list[Needle]:
    """The wordings of a mode as token ids of a model: one wording, or one per fact."""
    full_stop = np.asarray(encode("."), np.int64)[-1:]

    def tokens(text: str) -> np.ndarray:
        return np.asarray(encode(text), np.int64)

    return [
        Needle(tokens(w.needle), tokens(w.question), tokens(w.answer), full_stop, bos_id, w)
        for w in WORDINGS[mode]
    ]


def hide(needles: Sequence[Needle], haystacks: Sequence[np.ndarray]) -> list[Trial]:
    """The trials: one needle in every haystack, or each of several needles in one haystack, cyclically."""
    if len(needles) == 1:
        return [Trial(0, needles[0], sample, haystack) for sample, haystack in enumerate(haystacks)]
    places = itertools.cycle(enumerate(haystacks))
    return [Trial(fact, needle, *next(places)) for fact, needle in enumerate(needles)]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def first_line(text: str) -> str:
    """The scored part of a continuation: its first non-blank line."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
