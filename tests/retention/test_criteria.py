"""What the checks of the claims take for an error."""

import math

import pandas as pd
import pytest

from analysis.retention import errors, table1, table3, tableI


def scores(**of_methods):
    """Test records: scores of seeds 0, 1, ... by method, of 400 examples."""
    rows = [
        {"method": method, "seed": seed, "score_percent": score, "budget": 1.0 if method == "dense" else 0.3}
        for method, values in of_methods.items()
        for seed, score in enumerate(values)
    ]
    same = {"split": "test", "metric": "accuracy", "dataset": "d", "backbone": "b", "gates": "input"}
    return pd.DataFrame(rows).assign(measured_examples=400, **same)


def test_an_error_is_of_examples_and_of_seeds():
    table = errors.means_on_test(scores(ar=[80.0, 80.0], h2o=[76.0, 84.0], random=[80.0])).set_index("method")
    of_examples = math.sqrt(80 * 20 / 400)
    assert table["error"]["ar"] == table["error"]["random"] == pytest.approx(of_examples)
    assert table["error"]["h2o"] == pytest.approx(math.hypot(of_examples, 4.0))  # std 5.66 of two seeds


@pytest.mark.parametrize(
    ("other", "status"),
    [
        ([70.0, 70.0], "met"),
        ([78.5, 78.5], "undecided"),
        ([90.0, 90.0], "not met"),
        ([60.0, 88.0], "undecided"),
        ([76.2], "undecided"),  # 1.3 standard errors off
        ([75.0, 75.0], "undecided"),  # 1.7
        ([74.0, 74.0], "met"),  # 2.02
        ([83.8], "undecided"),
        ([70.0], "met"),
        ([86.0], "not met"),
    ],
)
def test_what_is_within_the_error_cannot_be_told(other, status):
    assert table1.beats_h2o(scores(ar=[80.0, 80.0], h2o=other)).status.value == status


@pytest.mark.parametrize(("other", "status"), [([82.9], "undecided"), ([90.0], "not met"), ([70.0], "met")])
def test_every_comparison_wants_what_a_95_percent_interval_shows(other, status):
    table = scores(ar=[80.0, 80.0], dense=[s / 0.95 for s in other], random=other, ar_fixed=other)
    table.loc[table["method"] == "dense", "budget"] = 1.0
    for check in (table1.keeps_dense_score, table1.beats_random, table3.ablations_lose):
        assert check(table).status.value == status


def speeds(**of_tasks):
    """Speed of Adaptive Retention by task: milliseconds at 512, 1,024, ... tokens, where dense takes 10."""
    rows = [
        {"dataset": task, "length_tokens": 512 * 2**i, "batch_ms": ms, "dense_batch_ms": 10.0}
        for task, values in of_tasks.items()
        for i, ms in enumerate(values)
    ]
    return pd.DataFrame(rows).assign(method="ar", backbone="b", budget=0.3, gates="input")


@pytest.mark.parametrize(
    ("times", "status"),
    [
        ({"long": [5.0, 4.0], "short": [5.0]}, "met"),
        ({"long": [4.0, 5.0], "short": [5.0]}, "not met"),
        ({"short": [5.0]}, "undecided"),
    ],
)
def test_tasks_of_one_length_do_not_decide_over_lengths(times, status):
    verdict = tableI.saves_more_when_longer(speeds(**times))
    assert verdict.status.value == status and "short, input, 30 %: 2.00x at 512" in verdict.ours


def test_one_comparison_of_many_contradicts_only_after_holm():
    table = scores(ar=[80.0, 80.0], h2o=[86.0, 86.0])  # 2.3 standard errors the wrong way
    assert table1.beats_h2o(table).status.value == "not met"
    tasks = [table.assign(dataset=name) for name in "efghij"]
    for other in tasks:
        other.loc[other["method"] == "h2o", "score_percent"] = 79.0
    assert table1.beats_h2o(pd.concat([table, *tasks])).status.value == "undecided"
