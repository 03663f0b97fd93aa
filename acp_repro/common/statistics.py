"""Statistics for all papers: confidence intervals, paired differences, equivalence tests, Holm's correction.

The unit of evidence is the quantity that was sampled at random, and the caller chooses it. Use
:func:`over_draws` for one number per training run, or per pair of runs, and :func:`over_items` for one number
per test item. The latter compares two *models*; two seeds of one method are also two models.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from .errors import UsageError

LEVEL = 0.05  # significance level of a test; an interval covers 1 - LEVEL
_FLIPS = 10_000
_SEED = 0


class Interval(NamedTuple):
    """A mean and its confidence interval; both bounds are NaN for a single value."""

    mean: float
    low: float
    high: float


class Estimate(NamedTuple):
    """A mean, its standard error (NaN for one value) and the degrees of freedom of the error."""

    mean: float
    error: float
    freedom: float

    def interval(self, level: float = LEVEL) -> Interval:
        """The confidence interval from Student's t distribution."""
        half = float(stats.t.ppf(1 - level / 2, self.freedom)) * self.error if self.freedom > 0 else math.nan
        return Interval(self.mean, self.mean - half, self.mean + half)

    def p_above(self, bound: float) -> float:
        """One-sided p-value of a test that the true mean is above ``bound``.

        p is 0 or 1 if three or more values are equal. Two equal values are too few to conclude that there is
        no variance, so p is 1.
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
    low: float  # the interval is within the margin if both tests reject
    high: float
    p_value: float  # the larger p of both tests; below LEVEL the difference is smaller than the margin
    beyond_p_value: float  # p of the opposite test; below LEVEL the difference is larger than the margin

    @property
    def shown(self) -> bool | None:
        """Whether the difference is smaller than the margin; None if neither test decides."""
        return True if self.p_value < LEVEL else False if self.beyond_p_value < LEVEL else None


class Homogeneity(NamedTuple):
    p_value: float  # of a permutation test of chi-squared, which shuffles items among the groups
    # The upper bound of Cohen's w from the noncentral chi-squared distribution. w is the square root of the
    # noncentrality per item; 0.3 is a medium effect.
    effect_high: float


def finite(
    values: Sequence[float], what: str = "the statistics", items: Sequence[object] | None = None
) -> np.ndarray:
    """``values`` as a float64 array without NaN, for which comparisons are silently false, and infinity."""
    values = np.asarray(values, dtype=float)
    for place in np.flatnonzero(~np.isfinite(values)):
        item = place if items is None else items[place]
        raise UsageError(f"{what}: item {item} is {values[place]}, and only finite numbers can be compared")
    return values


def over_draws(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The mean of independent values: one per seed, pair of training runs, or text.

    Args:
        weights: the number of words in each text's log-likelihood. The mean is then the sum of the values
            over the sum of the weights, and the delta method gives the error of this ratio.
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
    """The mean of differences per item: :func:`over_draws`, except for items that are right or wrong.

    For the latter it uses Bonett and Price's adjusted Wald method for paired proportions, which adds one item
    in each direction. Without it, ten items on which two models agree would have a standard error of 0.
    """
    apart = np.asarray(apart, dtype=float)
    if (weights is None or (np.asarray(weights) == 1).all()) and np.isin(apart, (-1.0, 0.0, 1.0)).all():
        count = len(apart) + 2
        up, down = (((apart == sign).sum() + 1) / count for sign in (1, -1))
        return Estimate(float(up - down), math.sqrt((up + down - (up - down) ** 2) / count), math.inf)
    return over_draws(apart, weights)


def paired_difference(apart: Sequence[float], weights: Sequence[float] | None = None) -> Difference:
    """The mean of differences per item, its interval (see :func:`over_items`) and :func:`p_value`."""
    apart = np.asarray(apart, dtype=float)
    mean = float(apart.sum() / (len(apart) if weights is None else np.sum(weights)))
    _, low, high = over_items(apart, weights).interval()
    return Difference(mean, low, high, p_value(apart))


def equivalence(estimate: Estimate, margin: float) -> Equivalence:
    """Two one-sided tests that a difference is within ``margin``, the smallest relevant difference, of 0.

    A difference that is not significant is no evidence of equivalence: two items or two seeds never differ
    significantly. These tests need enough items to rule out a difference as large as the margin.
    """
    below = estimate._replace(mean=-estimate.mean)
    _, low, high = estimate.interval(2 * LEVEL)  # each bound corresponds to one of the tests
    return Equivalence(
        low,
        high,
        p_value=max(estimate.p_above(-margin), below.p_above(-margin)),
        beyond_p_value=min(estimate.p_above(margin), below.p_above(margin)),
    )


def homogeneity(counts: Sequence[Sequence[int]]) -> Homogeneity:
    """Tests whether all groups (rows) have the same distribution over categories (columns)."""
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
    """Two-sided p-value of a paired test that positive and negative differences ``apart`` (items,) are
    equally likely.

    If all differences have the same size, as for right and wrong, it is McNemar's exact test. Otherwise it is
    a sign-flip test over all sign patterns if there are at most 10,000, else over 10,000 random ones with a
    fixed seed. (scipy's ``permutation_test`` does the same but is ten times slower for 5,000 items.)
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
    """Arrays whose rows are patterns of ``count`` signs: all patterns if at most 10,000, else random ones."""
    if 2**count <= _FLIPS:
        yield 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        return
    random = np.random.default_rng(_SEED)
    for _ in range(_FLIPS // 500):
        yield random.integers(0, 2, (500, count), dtype=np.int8) * 2 - 1


def holm(p_values: Sequence[float]) -> np.ndarray:
    """p-values after Holm's correction, (n,) float64; scipy only controls the false discovery rate."""
    p_values = np.asarray(p_values, dtype=float)
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.maximum.accumulate(p_values[order] * factors).clip(max=1.0)
    return adjusted[np.argsort(order)]  # in the order of ``p_values``


def p_above_guessing(right: int, count: int, guess: float) -> float:
    """One-sided p-value of a test that ``right`` correct answers of ``count`` exceed the rate of guessing."""
    return float(stats.binomtest(right, count, guess, "greater").pvalue)


def share_error(share, count):
    """The standard error of a proportion of ``count`` items, for scalars or arrays."""
    return (share * (1 - share) / count) ** 0.5
