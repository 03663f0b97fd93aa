"""What a criterion finds in records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import pandas as pd


class Status(StrEnum):
    """The six things that can be said of a criterion; the last two where there was nothing to judge."""

    MET = "met"
    BEYOND = "beyond"  # past the good end of the range that the paper prints
    MISSED = "not met"
    UNDECIDED = "undecided"  # the records cannot tell
    MISSING = "not measured"
    ABSENT = "not in suite"


class Word(StrEnum):
    """What REPRODUCTION.md says of a claim."""

    HOLDS = "holds"
    HERE = "holds at our scale"
    UNTOLD = "cannot be told"
    FAILS = "does not hold"

    @classmethod
    def of(cls, status: Status, at_paper_scale: bool) -> Self:
        """The one place where what a criterion finds becomes one of the four.

        Beyond a range on its good side supports the claim, though not its number, which the line then says.

        Args:
            at_paper_scale: nothing is missing to the paper's own scale, as for what is proved.
        """
        if status in (Status.MET, Status.BEYOND):
            return cls.HOLDS if at_paper_scale else cls.HERE
        return cls.FAILS if status is Status.MISSED else cls.UNTOLD


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
    values: pd.Series, low: float, high: float, ours: str, less_is_better: bool = False, unit: str = " %"
) -> Verdict:
    """Met if all values lie in the range; beyond if some pass its good end and none its bad one.

    Args:
        values, low, high: in ``unit``.
        ours: the numbers in words, to which the reason is added.
    """
    below, above = values[values < low], values[values > high]
    good, bad = (below, above) if less_is_better else (above, below)
    reasons = [
        f"{_apart(extreme, end)}{unit} is {side} the range of {low:g} to {high:g}{unit}"
        for side, extreme, end, some in (
            ("below", values.min(), low, below),
            ("above", values.max(), high, above),
        )
        if len(some)
    ]
    status = Status.MISSED if len(bad) else Status.BEYOND if len(good) else Status.MET
    return Verdict(status, ours + (f" ({' and '.join(reasons)})" if reasons else ""))


def _apart(value: float, end: float) -> str:
    """``value`` with as many digits as tell it from the end of a range that it is beyond."""
    digits = 0 if abs(value) >= 10 else 1
    while digits < 6 and (float(f"{value:.{digits}f}") - end) * (value - end) <= 0:
        digits += 1
    return f"{value:.{digits}f}"
