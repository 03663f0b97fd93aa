"""Errors of the pipeline."""

from collections.abc import Iterable, Mapping
from typing import Self, TypeVar

from ..common.errors import UsageError, UserError, did_you_mean

T = TypeVar("T")


class SuiteError(UsageError):
    """A suite file is wrong; the message is one line with file, key and the fix."""


_NAMES_SHOWN = 40  # the LM Evaluation Harness has 15,000 tasks


class UnknownName(SuiteError):
    """An unknown name; the message lists similar names, or all names."""

    @classmethod
    def among(cls, what: str, name: str, known: Iterable[str]) -> Self:
        """``what`` describes the unknown name; ``known`` are the existing names."""
        known = list(known)
        more = len(known) - _NAMES_SHOWN
        there = ", ".join(known) if more <= 0 else f"{', '.join(known[:_NAMES_SHOWN])} and {more:,} more"
        return cls(what + (did_you_mean(name, known) or f"; it has {there}"))


def find_named(known: Mapping[str, T], name: str, what: str) -> T:
    """The value called ``name``; raises :class:`UnknownName` that begins with ``what`` if there is none."""
    if name not in known:
        raise UnknownName.among(what, name, known)
    return known[name]


class RecordError(UserError, RuntimeError):
    """Records are missing or have another schema; the message names the command that measures them."""
