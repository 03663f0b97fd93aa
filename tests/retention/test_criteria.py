"""What the checks of the claims take for an error."""

import math

import pandas as pd
import pytest

from analysis.retention import criteria


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
    table = criteria._test_means(scores(ar=[80.0, 80.0], h2o=[76.0, 84.0], random=[80.0])).set_index("method")
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
    ],
)
def test_what_is_within_the_error_cannot_be_told(other, status):
    assert criteria.beats_h2o(scores(ar=[80.0, 80.0], h2o=other)).status.value == status
