"""The uncertainty of numbers: intervals, paired differences, equivalence, Holm's correction. For every paper.

The unit of evidence is what was drawn at random, and the caller chooses it. One number a training, or a pair
of trainings, goes to :func:`over_draws`. One number a test item goes to :func:`over_items`. So it tells two
*models* apart, and two seeds of one method are two models as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from .errors import UsageError

LEVEL = 0.05  # of a test; an interval covers the rest
_FLIPS = 10_000
_SEED = 0


class Interval(NamedTuple):
    """A mean and its confidence interval; both ends are NaN for a single value."""

    mean: float
    low: float
    high: float


class Estimate(NamedTuple):
    """A mean, its standard error (NaN for one value) and the degrees of freedom of that error."""

    mean: float
    error: float
    freedom: float

    def interval(self, level: float = LEVEL) -> Interval:
        """The confidence interval by Student's t."""
        half = float(stats.t.ppf(1 - level / 2, self.freedom)) * self.error if self.freedom > 0 else math.nan
        return Interval(self.mean, self.mean - half, self.mean + half)

    def p_above(self, bound: float) -> float:
        """One-sided p of a test that the true mean is above ``bound``.

        0 or 1 if three values or more do not spread. Two that are equal are too few to say that none will be
        apart, so their p is 1.
        """
        if self.error == 0:
            return float(self.mean <= bound or self.freedom < 2)
        return float(stats.t.sf((self.mean - bound) / self.error, self.freedom))


class Difference(NamedTuple):
    mean: float
    low: float
    high: float
    p_value: float


class Equivalence(NamedTuple):
    low: float  # the interval that is within the margin if the two tests agree
    high: float
    p_value: float  # the larger of the two; below LEVEL the difference is smaller than the margin
    beyond_p_value: float  # of the opposite test; below LEVEL the difference is larger than the margin

    @property
    def shown(self) -> bool | None:
        """Whether the difference is smaller than the margin; None if neither test decides."""
        return True if self.p_value < LEVEL else False if self.beyond_p_value < LEVEL else None


class Homogeneity(NamedTuple):
    p_value: float  # of a test that shuffles items among the groups and compares chi-squared
    # The upper bound of Cohen's w, by the noncentral chi-squared distribution. w is the root of chi-squared,
    # as it would be without chance, over the number of items; 0.3 is a medium effect.
    effect_high: float


def finite(
    values: Sequence[float], what: str = "the statistics", items: Sequence[object] | None = None
) -> np.ndarray:
    """``values`` as float64, for a test or a verdict: comparisons with NaN are false, and do not say so."""
    values = np.asarray(values, dtype=float)
    for place in np.flatnonzero(~np.isfinite(values)):
        item = place if items is None else items[place]
        raise UsageError(f"{what}: item {item} is {values[place]}, and only finite numbers can be compared")
    return values


def over_draws(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The mean of values that were drawn separately: seeds, pairs of trainings, texts.

    Args:
        weights: how many words each text's log-likelihood covers. The mean is then the sum over their sum,
            and its error that of a ratio, by the delta method.
    """
    values, count = finite(values), len(values)
    mean, residues = float(values.mean()), values
    if weights is not None:
        weights = finite(weights)
        mean = float(values.sum() / weights.sum())
        residues = (values - mean * weights) / weights.mean()
    error = float(residues.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(mean, error, count - 1)


def over_items(apart: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The mean of differences item by item: :func:`over_draws`, except for items that are right or wrong.

    Those use Bonett and Price's adjusted Wald method for paired shares, which adds one item up and one down.
    Otherwise ten items on which two models agree would leave no doubt.
    """
    apart = np.asarray(apart, dtype=float)
    if (weights is None or (np.asarray(weights) == 1).all()) and np.isin(apart, (-1.0, 0.0, 1.0)).all():
        count = len(apart) + 2
        up, down = (((apart == sign).sum() + 1) / count for sign in (1, -1))
        return Estimate(float(up - down), math.sqrt((up + down - (up - down) ** 2) / count), math.inf)
    return over_draws(apart, weights)


def interval(values: Sequence[float]) -> Interval:
    """The mean of values that were drawn separately, and its interval."""
    return over_draws(values).interval()


def paired_difference(apart: Sequence[float], weights: Sequence[float] | None = None) -> Difference:
    """The mean of differences item by item, its interval (see :func:`over_items`) and :func:`p_value`."""
    apart = np.asarray(apart, dtype=float)
    mean = float(apart.sum() / (len(apart) if weights is None else np.sum(weights)))
    _, low, high = over_items(apart, weights).interval()
    return Difference(mean, low, high, p_value(apart))


def equivalence(estimate: Estimate, margin: float) -> Equivalence:
    """Two one-sided tests that a difference is within ``margin`` of 0, the smallest that would matter.

    To find no difference does not show that there is none: two items or two seeds never differ significantly.
    These tests need enough items to rule out a difference as large as the margin.
    """
    below = estimate._replace(mean=-estimate.mean)
    _, low, high = estimate.interval(2 * LEVEL)  # each of its ends is one of the tests
    return Equivalence(
        low,
        high,
        p_value=max(estimate.p_above(-margin), below.p_above(-margin)),
        beyond_p_value=min(estimate.p_above(margin), below.p_above(margin)),
    )


def homogeneity(counts: Sequence[Sequence[int]]) -> Homogeneity:
    """Whether groups (rows) draw their kinds (columns) from one distribution."""
    counts = np.asarray(counts, dtype=int)
    counts = counts[:, counts.any(axis=0)]
    if min(counts.shape) < 2:
        return Homogeneity(1.0, 0.0)
    shuffle = stats.PermutationMethod(n_resamples=_FLIPS - 1, rng=np.random.default_rng(_SEED))
    found = stats.chi2_contingency(counts, correction=False, method=shuffle)
    freedom = math.prod(n - 1 for n in counts.shape)

    def beyond(noncentrality: float) -> float:
        return stats.ncx2.cdf(found.statistic, freedom, noncentrality) - LEVEL

    largest = 0.0
    if stats.chi2.cdf(found.statistic, freedom) > LEVEL:
        largest = optimize.brentq(beyond, 1e-9, 10 * (found.statistic + freedom + 10))
    return Homogeneity(float(found.pvalue), math.sqrt(largest / counts.sum()))


def p_value(apart: np.ndarray) -> float:
    """Two-sided p of a paired test that the differences ``apart`` (items,) are equally likely up and down.

    If they all have one size, as for right and wrong, it is McNemar's exact test. Otherwise signs are
    flipped: in all ways if there are at most 10,000, else in 10,000 random ones with a fixed seed. (scipy's
    ``permutation_test`` does the same and takes ten times as long over 5,000 items.)
    """
    apart = finite(apart)
    apart = apart[apart != 0]
    if not len(apart):
        return 1.0
    if (np.abs(apart) == abs(apart[0])).all():
        return float(stats.binomtest(int((apart > 0).sum()), len(apart)).pvalue)
    seen, beyond = abs(apart.sum()) * (1 - 1e-12), 0
    for signs in _signs(len(apart)):
        beyond += int((np.abs(signs @ apart) >= seen).sum())
    if 2 ** len(apart) <= _FLIPS:
        return beyond / 2 ** len(apart)
    return (beyond + 1) / (_FLIPS + 1)


def _signs(count: int) -> Iterator[np.ndarray]:
    """Rows of ``count`` signs: all of them, if there are no more than the draws."""
    if 2**count <= _FLIPS:
        yield 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return
    random = np.random.default_rng(_SEED)
    for _ in range(_FLIPS // 500):
        yield random.integers(0, 2, (500, count), dtype=np.int8) * 2 - 1


def holm(p_values: Sequence[float]) -> np.ndarray:
    """p after Holm's correction, (n,) float64; scipy corrects only the rate of false discoveries."""
    p_values = np.asarray(p_values, dtype=float)
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.maximum.accumulate(p_values[order] * factors).clip(max=1.0)
    result = np.empty_like(adjusted)
    result[order] = adjusted
    return result


def p_above_guessing(right: int, count: int, guess: float) -> float:
    """One-sided p of a test that ``right`` answers of ``count`` are more than guessing gives."""
    return float(stats.binomtest(right, count, guess, "greater").pvalue)


def share_error(share, count):
    """The standard error of a share of ``count`` items, for numbers or for columns of them."""
    return (share * (1 - share) / count) ** 0.5
