"""What tables of Adaptive Retention print."""

import pandas as pd
import pytest

from analysis.retention import figure_gates, table1, table4


def test_times_of_short_batches_keep_their_digits():
    same = {"dataset": "d", "backbone": "b", "method": "ar", "budget": 0.3, "gates": "input"}
    records = pd.DataFrame(
        [
            {"batch_examples": 256, "length_tokens": 512, "batch_ms": 10.3},
            {"batch_examples": 32, "length_tokens": 4096, "batch_ms": 11.8},
        ]
    ).assign(**same, **{name: 20.0 for name in table4._USED[2:]})
    shown = table4.tabulate(records).shown
    assert shown["ms per 1k tokens"][0] == "0.079" and shown["ms per batch"][0] == "10.3"
    quoted = shown[shown[""] == "Adaptive Retention (quoted, 30 %)"]
    assert quoted["ms per 1k tokens"].item() == "540"
    assert table4._batches(records) == "256 examples of 512 tokens, 32 of 4,096"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([1, 1], "one seed"),
        ([2, 2], "mean and standard deviation over seeds, with their number in brackets"),
        ([1, 3], "mean and standard deviation over seeds, with their number in brackets (none: one seed)"),
    ],
)
def test_one_seed_has_no_deviation(counts, words):
    table = pd.DataFrame({"source": ["measured", "measured", "paper"], "count": [*counts, None]})
    assert table1._seeds(table) == words


def test_where_the_gate_stands_is_drawn_on_one_axis_for_all_tasks():
    rows = [
        {
            "dataset": task,
            "pruning": pruning,
            "pruning_gates": gates,
            "pruning_budget": budget,
            "score_percent": x,
        }
        for task, x in (("easy", 99.0), ("hard", 20.0))
        for pruning, gates, budget in [("none", "none", 1.0)]
        + [(p, g, b) for p in ("random", "h2o") for g in ("input", "after_blocks") for b in (0.3, 0.5)]
    ]
    figure = figure_gates.draw(pd.DataFrame(rows).assign(metric="accuracy"))
    assert [ax.get_ylim() for ax in figure.axes] == [(0, 100), (0, 100)]
