"""The shared statistics, compared with hand computations and published tables."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from acp_repro.common import statistics
from analysis.acp import statistics as acp_statistics


def test_confidence_interval_matches_a_hand_computation():
    # 1, 2, 3: standard deviation 1, error 1/sqrt(3), two degrees of freedom.
    expected = pytest.approx((2, 2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert statistics.over_draws([1.0, 2.0, 3.0]).interval() == expected
    assert statistics.over_draws([1.0] * 40).interval() == (1.0, 1.0, 1.0)
    mean, low, high = statistics.over_draws([1.0]).interval()
    assert mean == 1 and math.isnan(low) and math.isnan(high)


def test_p_values_match_their_definitions():
    # McNemar: 2 up, 8 down of ten items that differ: 2 P(X <= 2) = 2 (1 + 10 + 45) / 1024.
    apart = np.array([1.0] * 2 + [-1.0] * 8 + [0.0] * 50)
    assert statistics.p_value(apart) == pytest.approx(112 / 1024)
    assert statistics.p_value(np.zeros(5)) == statistics.p_value(np.array([1.0, -1.0])) == 1.0
    # Of 3,000 items that differ, as of ten: no sum of binomials overflows.
    assert statistics.p_value(np.repeat([1.0, -1.0], [1600, 1400])) == pytest.approx(2.77e-4, rel=0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_values_have_no_statistics(bad):
    for statistic in (statistics.p_value, statistics.over_draws, statistics.paired_difference):
        with pytest.raises(ValueError, match="item 1 is"):
            statistic(np.array([0.5, bad, 0.5]))


def test_sign_flips_are_exhaustive_for_few_items_and_random_for_many():
    # Two of eight sign patterns, +++ and ---, are as extreme as the data.
    assert statistics.p_value(np.array([1.0, 2.0, 3.5])) == 2 / 8
    apart = np.array([0.3, -0.1, 0.25, 0.5, -0.2, 0.15, 0.33, 0.41, -0.05, 0.6])
    sums = [abs(np.dot(signs, apart)) for signs in itertools.product((-1, 1), repeat=10)]
    assert statistics.p_value(apart) == np.mean([value >= abs(apart.sum()) - 1e-12 for value in sums])
    fourteen = np.append(apart, [0.2, -0.3, 0.1, 0.4])
    sums = [abs(np.dot(signs, fourteen)) for signs in itertools.product((-1, 1), repeat=14)]
    exact = np.mean([value >= abs(fourteen.sum()) - 1e-12 for value in sums])
    assert statistics.p_value(fourteen) == pytest.approx(exact, abs=0.01)
    assert statistics.p_value(fourteen) == statistics.p_value(fourteen)


def test_p_values_are_uniform_under_the_null_hypothesis():
    """Detects a test that rejects too often or never."""
    random = np.random.default_rng(1)
    found = np.array([statistics.p_value(random.normal(size=40)) for _ in range(200)])
    assert 0.01 <= (found < 0.05).mean() <= 0.1 and 0.4 < found.mean() < 0.6


def test_holm_correction_matches_its_definition():
    assert statistics.holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert statistics.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_paired_shares_match_a_hand_computation():
    # Bonett and Price: 15 up and 5 down of 98: (16 - 6) / 100 within 1.96 sqrt((0.22 - 0.01) / 100).
    apart = np.repeat([1.0, -1.0, 0.0], [15, 5, 78])
    found = statistics.paired_difference(apart)
    assert found.mean == pytest.approx(10 / 98)
    assert (found.low, found.high) == pytest.approx((0.1 - 0.089816, 0.1 + 0.089816), abs=1e-5)
    assert found.p_value == pytest.approx(2 * sum(math.comb(20, k) for k in range(6)) / 2**20)
    # Ten items on which two models agree give an interval of 0.22 on either side.
    _, low, high, p = statistics.paired_difference(np.zeros(10))
    assert (low, high, p) == pytest.approx((-0.2310, 0.2310, 1.0), abs=1e-3)


def test_log_likelihoods_are_averaged_over_words():
    # Two articles of 10 and 30 words, 1 and 3 nats apart: 0.1 a word in both, so no doubt is left.
    assert statistics.paired_difference([1.0, 3.0], [10.0, 30.0])[:3] == pytest.approx((0.1, 0.1, 0.1))
    # 2 and 0 nats: 0.05 a word; residues 1.5 and -1.5 over a mean weight of 20, one degree of freedom.
    found = statistics.paired_difference([2.0, 0.0], [10.0, 30.0])
    half = 12.7062 * math.sqrt(2) * 1.5 / 20 / math.sqrt(2)
    assert (found.mean, found.high) == pytest.approx((0.05, 0.05 + half), rel=1e-4)


def test_equivalence_uses_two_one_sided_tests():
    # Three pairs: mean 0.002, error 0.001, so the worse test has t = (0.005 - 0.002) / 0.001 = 3.
    pairs = statistics.over_draws([0.002 - 0.001 * math.sqrt(3), 0.002, 0.002 + 0.001 * math.sqrt(3)])
    assert (pairs.mean, pairs.error, pairs.freedom) == pytest.approx((0.002, 0.001, 2))
    found = statistics.equivalence(pairs, 0.005)
    assert found.p_value == pytest.approx(0.5 * (1 - 3 / math.sqrt(2 + 9)))  # t with 2 degrees of freedom
    assert (found.low, found.high) == pytest.approx((0.002 - 0.0029200, 0.002 + 0.0029200), abs=1e-6)
    assert (found.p_value < 0.05) is (found.high < 0.005)
    assert statistics.equivalence(pairs, 0.0048).p_value > 0.05 > statistics.equivalence(pairs, 0.005).p_value
    assert found.beyond_p_value > 0.9


def test_differences_beyond_the_margin_are_distinguished_from_inconclusive_ones():
    pairs = statistics.over_draws([0.1, 0.11, 0.09, 0.1])
    assert statistics.equivalence(pairs, 0.02).beyond_p_value < 0.05
    below = statistics.equivalence(statistics.over_draws([-0.1, -0.11, -0.09]), 0.02)
    assert below.beyond_p_value < 0.05 < below.p_value
    wide = statistics.equivalence(statistics.over_draws([0.1, -0.1]), 0.02)
    assert wide.p_value > 0.05 and wide.beyond_p_value > 0.05


def test_one_value_or_two_equal_values_are_inconclusive_and_three_are_not():
    one = statistics.equivalence(statistics.over_draws([0.0]), 1.0)
    assert all(map(math.isnan, one))
    two = statistics.equivalence(statistics.over_draws([0.0, 0.0]), 1e-9)
    assert two == (0.0, 0.0, 1.0, 1.0) and two.shown is None
    assert statistics.equivalence(statistics.over_draws([0.0] * 3), 1e-9) == (0.0, 0.0, 0.0, 1.0)
    # Items are not training runs: ten equal items do not predict the next run.
    assert statistics.equivalence(statistics.over_items([0.0] * 10), 0.01).p_value > 0.05
    assert statistics.equivalence(statistics.over_items([0.0] * 1000), 0.01).p_value < 0.05


def test_spread_between_groups_of_one_distribution():
    # Two pure groups of ten: one of 92,378 possible splits.
    apart = statistics.homogeneity([[10, 0], [0, 10]])
    assert apart.p_value < 1e-3 and apart.effect_high > 1
    # Chi-squared 2.564 of 100 items: the noncentrality that puts it at the 5 % quantile is 10.5.
    some = statistics.homogeneity([[30, 20], [22.0, 28.0]])
    assert some.effect_high == pytest.approx(math.sqrt(10.54 / 100), rel=0.002)
    assert statistics.homogeneity([[5, 0], [7, 0]]) == (1.0, 0.0)  # of one class
    again = [statistics.homogeneity([[8, 2], [5, 5]]).p_value for _ in range(2)]
    assert again[0] == again[1] == pytest.approx(0.35, abs=0.02)  # Fisher's exact test: 0.3498


def test_savings_match_a_hand_computation():
    run = {"architecture": "pro", "size": "a", "context_length_tokens": 128, "seed": 0, "trained_tokens": 1}
    run |= {"log_pruning_tolerance": -10.0, "device": "a GPU"}
    heads = [{"layer": 0, "head": head, "pruned_blocks": p} for head, p in enumerate((4, 9))]
    blocks = pd.DataFrame([{**run, **head, "causal_blocks": 10} for head in heads])
    assert acp_statistics.pruned_percent(blocks)["percent"].tolist() == [65.0]
    rows = [
        {**run, "method": "acp", "forward_ms": 1.0, "backward_ms": 2.0, "throughput_tokens_per_s": 150.0},
        {**run, "method": "exact", "forward_ms": 8.0, "backward_ms": 4.0, "throughput_tokens_per_s": 100.0},
    ]
    measured = pd.DataFrame(rows)
    assert [acp_statistics.time_reduction(measured, n)["percent"].item() for n in (1, 2)] == [75.0, 80.0]
    assert acp_statistics.throughput_gain(measured)["percent"].tolist() == pytest.approx([50.0])


def test_weighted_items_match_a_hand_computation():
    # The mean is 6 / 12. Residues (2 - 1, 1 - 3, 3 - 2) / 4 have a deviation of sqrt(3) / 4.
    found = statistics.over_draws([2.0, 1.0, 3.0], [2.0, 6.0, 4.0])
    assert (found.mean, found.error) == pytest.approx((0.5, 0.25))
    assert statistics.paired_difference([2.0, 1.0, 3.0], [2.0, 6.0, 4.0]).mean == 0.5
    # Only items of weight 1 are correct or wrong: (2 + 1) / 5 - 1 / 5 of them, and 2 of 6 words.
    assert statistics.over_items([1.0, 0.0, 1.0], [1.0] * 3).mean == pytest.approx(0.4)
    assert statistics.over_items([1.0, 0.0, 1.0], [2.0] * 3).mean == pytest.approx(1 / 3)
