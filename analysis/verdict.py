"""Verdicts, and the results of criteria on records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import pandas as pd

from acp_repro.common.statistics import finite

from . import style


class Word(StrEnum):
    """The verdicts, in the order of every count."""

    PROVED = "proved"
    TESTED = "tested"
    REPRODUCED = "reproduced"
    SMALL_SCALE = "reproduced at small scale"
    MAGNITUDE = "different magnitude"
    INCONCLUSIVE = "inconclusive"
    CONTRADICTED = "contradicted"
    ERRATUM = "erratum"


MEANINGS = (
    "**proved**: a theorem decides the claim for every model. **tested**: a test of the code decides the "
    "claim for every model.",
    "**reproduced**: our models meet the criterion at the paper's model size and context length, after at "
    "least a tenth of the paper's training tokens. Timings and other claims without a trained model need "
    "only meet the criterion.",
    "**reproduced at small scale**: our models meet the criterion with a smaller model, a shorter context or "
    "fewer tokens.",
    "**different magnitude**: the effect has the paper's direction and a size outside the paper's range.",
    "**inconclusive**: the results do not decide the claim, or no results exist. Claims marked "
    "(ours) are not claims of the paper. They count as inconclusive even if they meet their criterion.",
    "**contradicted**: the results show that the claim fails by its criterion.",
    "**erratum**: the paper is wrong as printed. The claim's page explains the error.",
)


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        ours: the complete answer, as Markdown: one sentence per line, without the final period.
        short: the answer in at most 100 characters; empty if ``ours`` is as short.
        runs: the runs of a suite that decide; by default all runs with records.
        n, unit: the number and kind of samples that decide; by default training runs or timed models.
        values: numbers by label, or (mean, low, high), for plots and tables; ``axis`` has their quantity and
            unit, ``paper_range`` the ends of the paper's range.
    """

    word: Word
    ours: str
    short: str = ""
    n: int | None = None
    unit: str = ""
    values: Mapping[str, float | tuple[float, float, float]] = field(default_factory=dict)
    axis: str = ""
    paper_range: Sequence[float] = ()
    runs: Sequence[str] = ()

    @classmethod
    def of(cls, met: bool | None, ours: str, short: str = "", **more) -> Self:
        """The verdict of a one-sided criterion; None is inconclusive."""
        word = Word.INCONCLUSIVE if met is None else Word.REPRODUCED if met else Word.CONTRADICTED
        return cls(word, ours, short, **more)


def in_range(
    measured: pd.Series,
    low: float,
    high: float,
    ours: str,
    less_is_better: bool = False,
    suffix: str = " %",
    nothing: float = 0.0,
    paper: str = "",
    what: str = "",
    **more,
) -> Verdict:
    """Reproduced if all values are in the range. Different magnitude if some values exceed its favourable
    end, or if some fall short of its unfavourable end and all are better than ``nothing``, the value of no
    effect; None for quantities that only have to be small. In the short answer, ``what`` follows the number.
    """
    finite(measured, ours, measured.index)
    below, above = measured[measured < low], measured[measured > high]
    bad = above if less_is_better else below
    printed = f"the range of {low:g} to {high:g}" if high > low else f"{low:g}"
    reasons = [
        f"{_apart(extreme, end)}{suffix} is {side} {printed}{suffix}"
        for side, extreme, end, some in (
            ("below", measured.min(), low, below),
            ("above", measured.max(), high, above),
        )
        if len(some)
    ]
    word = Word.MAGNITUDE if reasons else Word.REPRODUCED
    if len(bad) and (less_is_better or measured.min() <= nothing):
        word = Word.CONTRADICTED
    ends = low if measured.min() < low else high
    digits = len(_apart(measured.min(), ends).partition(".")[2])
    paper = paper or (f"{low:g} to {high:g}" if high > low else f"{low:g}")
    short = f"{style.span(measured, f'.{digits}f')}{suffix}{what} (paper: {paper}{suffix})"
    more.setdefault("paper_range", (low, high))
    return Verdict(word, ". ".join([ours, *reasons]), short, **more)


def _apart(value: float, end: float) -> str:
    """``value`` with enough digits to distinguish it from the end of the range that it exceeds."""
    digits = 0 if abs(value) >= 10 else 1
    while digits < 6 and (float(f"{value:.{digits}f}") - end) * (value - end) <= 0:
        digits += 1
    return f"{value:.{digits}f}"
