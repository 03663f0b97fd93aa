"""How sure a number is: intervals, paired differences, equivalence, Holm's correction. For every paper alike.

It lies here and not in ``analysis`` because ``python -m acp_repro.compare`` uses it too, and an installed
package has no ``analysis``. It alone of this package needs numpy and scipy (the extra ``chain``), so nothing
that a method imports may import it. scipy takes a second to import, and is where something is computed.

The unit of evidence is what was drawn at random, and the caller says what that was: :func:`over_draws` takes
one number a training, or a pair of trainings; :func:`over_items` takes one a test item, and so tells two
*models* apart, which two seeds of one method are as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05  # of a test; an interval covers the rest
_FLIPS = 10_000
_SEED = 0


class Interval(NamedTuple):
    """A mean and what it may be; NaN at both ends where a single value leaves that open."""

    mean: float
    low: float
    high: float


class Estimate(NamedTuple):
    """A mean, its standard error (NaN of one value) and the degrees of freedom of that."""

    mean: float
    error: float
    freedom: float

    def interval(self, level: float = LEVEL) -> Interval:
        """By Student's t."""
        from scipy import stats

        half = float(stats.t.ppf(1 - level / 2, self.freedom)) * self.error if self.freedom > 0 else math.nan
        return Interval(self.mean, self.mean - half, self.mean + half)

    def p_above(self, bound: float) -> float:
        """One-sided p of a test that the true mean is above ``bound``; without any spread it is settled."""
        from scipy import stats

        if self.error == 0:
            return float(self.mean <= bound)
        return float(stats.t.sf((self.mean - bound) / self.error, self.freedom))


class Difference(NamedTuple):
    """What :func:`paired_difference` finds."""

    mean: float
    low: float
    high: float
    p_value: float


class Equivalence(NamedTuple):
    """What :func:`equivalence` finds.

    Attributes:
        low, high: the interval that lies within the margin where the two tests agree.
        p_value: the larger of the two; below :data:`LEVEL` the difference is smaller than the margin.
        beyond_p_value: of the opposite test; below :data:`LEVEL` the difference is larger than the margin.
    """

    low: float
    high: float
    p_value: float
    beyond_p_value: float

    @property
    def shown(self) -> bool | None:
        """None where neither test decides."""
        return True if self.p_value < LEVEL else False if self.beyond_p_value < LEVEL else None


class Homogeneity(NamedTuple):
    """What :func:`homogeneity` finds.

    Attributes:
        p_value: of a test that shuffles items among the groups and compares chi-squared.
        effect_high: the upper bound of Cohen's w, the root of chi-squared over the number of items as it
            would be without chance, by the noncentral chi-squared distribution; 0.3 is a medium effect.
    """

    p_value: float
    effect_high: float


def over_draws(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Of values that were drawn apart: seeds, pairs of trainings, texts.

    Args:
        weights: how many words a text's log-likelihood is of: the mean is then the sum over their sum, and
            its error that of a ratio, by the delta method.
    """
    values, count = np.asarray(values, dtype=float), len(values)
    mean, residues = float(values.mean()), values
    if weights is not None:
        weights = np.asarray(weights, dtype=float)
        mean = float(values.sum() / weights.sum())
        residues = (values - mean * weights) / weights.mean()
    error = float(residues.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(mean, error, count - 1)


def over_items(apart: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Of differences item by item: :func:`over_draws`, but where items are right or wrong.

    These take Bonett and Price's adjusted Wald method for paired shares, which adds an item up and one down:
    without them, ten items on which two models agree would leave no doubt.
    """
    apart = np.asarray(apart, dtype=float)
    if (weights is None or (np.asarray(weights) == 1).all()) and np.isin(apart, (-1.0, 0.0, 1.0)).all():
        count = len(apart) + 2
        up, down = (((apart == sign).sum() + 1) / count for sign in (1, -1))
        return Estimate(float(up - down), math.sqrt((up + down - (up - down) ** 2) / count), math.inf)
    return over_draws(apart, weights)


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean of values that were drawn apart, and its interval."""
    return over_draws(values).interval(level)


def paired_difference(
    apart: Sequence[float], weights: Sequence[float] | None = None, level: float = LEVEL
) -> Difference:
    """The mean of differences item by item, its interval (see :func:`over_items`) and :func:`p_value`."""
    apart = np.asarray(apart, dtype=float)
    mean = float(apart.sum() / (len(apart) if weights is None else np.sum(weights)))
    _, low, high = over_items(apart, weights).interval(level)
    return Difference(mean, low, high, p_value(apart))


def equivalence(estimate: Estimate, margin: float, level: float = LEVEL) -> Equivalence:
    """Two one-sided tests that a difference lies within ``margin`` on either side of 0.

    To find no difference is not to find that there is none: two items or two seeds never differ
    significantly. These tests ask for enough of them to rule out a difference as large as the margin.

    Args:
        estimate: of the difference, over the right unit.
        margin: the smallest difference that would matter, known before these data.

    Raises:
        ValueError: the margin is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"a margin is above 0, got {margin:g}")
    below = estimate._replace(mean=-estimate.mean)
    _, low, high = estimate.interval(2 * level)  # each of its ends is one of the tests
    return Equivalence(
        low,
        high,
        p_value=max(estimate.p_above(-margin), below.p_above(-margin)),
        beyond_p_value=min(estimate.p_above(margin), below.p_above(margin)),
    )


def homogeneity(counts: Sequence[Sequence[int]], level: float = LEVEL) -> Homogeneity:
    """Whether groups (rows) draw their kinds (columns) from one distribution."""
    from scipy import optimize, stats

    counts = np.asarray(counts, dtype=int)
    counts = counts[:, counts.any(axis=0)]
    if min(counts.shape) < 2:
        return Homogeneity(1.0, 0.0)
    shuffle = stats.PermutationMethod(n_resamples=_FLIPS - 1, rng=np.random.default_rng(_SEED))
    found = stats.chi2_contingency(counts, correction=False, method=shuffle)
    freedom = math.prod(n - 1 for n in counts.shape)

    def beyond(noncentrality: float) -> float:
        return stats.ncx2.cdf(found.statistic, freedom, noncentrality) - level

    largest = 0.0
    if stats.chi2.cdf(found.statistic, freedom) > level:
        largest = optimize.brentq(beyond, 1e-9, 10 * (found.statistic + freedom + 10))
    return Homogeneity(float(found.pvalue), math.sqrt(largest / counts.sum()))


def p_value(apart: np.ndarray) -> float:
    """Two-sided p of a paired test that ``apart``, the differences of items, are as likely up as down.

    Where they are all of one size, as right or wrong is, it is McNemar's exact test. Else it turns signs: in
    all ways where these are no more than 10,000, else in 10,000 random ones with a fixed seed. (scipy's
    ``permutation_test`` does the same and takes ten times as long over 5,000 items.)
    """
    from scipy import stats

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
    """Rows of ``count`` signs: all that there are, if these are no more than the draws."""
    if 2**count <= _FLIPS:
        yield 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return
    random = np.random.default_rng(_SEED)
    for _ in range(_FLIPS // 500):
        yield random.integers(0, 2, (500, count), dtype=np.int8) * 2 - 1


def holm(p_values: Sequence[float]) -> np.ndarray:
    """p after Holm's correction: below a level, it holds at that level for all of them together.

    By hand, since scipy corrects the rate of false discoveries alone.
    """
    p_values = np.asarray(p_values, dtype=float)
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.maximum.accumulate(p_values[order] * factors).clip(max=1.0)
    result = np.empty_like(adjusted)
    result[order] = adjusted
    return result


def p_above_guessing(right: int, count: int, guess: float) -> float:
    """One-sided p of a test that so many right answers of ``count`` are more than guessing gives."""
    from scipy import stats

    return float(stats.binomtest(right, count, guess, "greater").pvalue)


def share_error(share, count):
    """The standard error of a share of ``count`` items; of numbers, or of columns of them."""
    return (share * (1 - share) / count) ** 0.5
