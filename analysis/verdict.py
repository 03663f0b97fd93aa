"""What a criterion finds in records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import pandas as pd

from acp_repro.common.statistics import finite


class Status(StrEnum):
    """The seven things that can be said of a criterion; the last two where there was nothing to judge."""

    MET = "met"
    BEYOND = "beyond"  # past the good end of the range that the paper prints
    SHORT = "short"  # short of its bad end, and yet of the kind that it says: a saving, a gain
    MISSED = "not met"
    UNDECIDED = "undecided"  # the records cannot tell
    MISSING = "not measured"
    ABSENT = "not in suite"


class Word(StrEnum):
    """What REPRODUCTION.md says of a claim."""

    PROVED = "proved or computed"
    MEASURED = "measured in the paper's range"
    ANOTHER_SIZE = "same direction, another size"
    UNTOLD = "cannot be told"
    CONTRADICTED = "contradicted"
    MISPRINT = "misprint"

    @classmethod
    def of(cls, status: Status) -> Self:
        """What a criterion finds in records, as one of these; proofs and misprints have no records."""
        words = {
            Status.MET: cls.MEASURED,
            Status.BEYOND: cls.ANOTHER_SIZE,
            Status.SHORT: cls.ANOTHER_SIZE,
            Status.MISSED: cls.CONTRADICTED,
        }
        return words.get(status, cls.UNTOLD)


@dataclass(frozen=True)
class Verdict:
    """What a check found; ``ours`` gives the numbers in the Markdown of captions."""

    status: Status
    ours: str

    @classmethod
    def of(cls, met: bool | None, ours: str) -> Self:
        """Of a criterion with one side; None is undecided."""
        status = {True: Status.MET, False: Status.MISSED, None: Status.UNDECIDED}
        return cls(status[None if met is None else bool(met)], ours)


def in_range(
    values: pd.Series,
    low: float,
    high: float,
    ours: str,
    less_is_better: bool = False,
    unit: str = " %",
    nothing: float = 0.0,
) -> Verdict:
    """Met if all values lie in the range; beyond if some pass its good end and none its bad one; short if
    some do, but all are better than nothing.

    Args:
        values, low, high: in ``unit``.
        ours: the numbers in words, to which the reason is added.
        nothing: the value of no effect; what is only to be little has none, so it is missed and never short.
    """
    finite(values, ours, values.index)
    below, above = values[values < low], values[values > high]
    good, bad = (below, above) if less_is_better else (above, below)
    printed = f"the range of {low:g} to {high:g}" if high > low else f"{low:g}"
    reasons = [
        f"{_apart(extreme, end)}{unit} is {side} {printed}{unit}"
        for side, extreme, end, some in (
            ("below", values.min(), low, below),
            ("above", values.max(), high, above),
        )
        if len(some)
    ]
    status = Status.BEYOND if len(good) else Status.MET
    if len(bad):
        status = Status.MISSED if less_is_better or values.min() <= nothing else Status.SHORT
    return Verdict(status, ours + (f" ({' and '.join(reasons)})" if reasons else ""))


def _apart(value: float, end: float) -> str:
    """``value`` with as many digits as tell it from the end of a range that it is beyond."""
    digits = 0 if abs(value) >= 10 else 1
    while digits < 6 and (float(f"{value:.{digits}f}") - end) * (value - end) <= 0:
        digits += 1
    return f"{value:.{digits}f}"
