"""What tables of Adaptive Retention print."""

import math

import pandas as pd
import pytest

from analysis.retention import figure2, figure_gates, figureC, models, table1, table3, table4, tableI


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


def test_what_each_place_of_the_gate_loses():
    rows = [("none", "none", 1.0, 90.0), ("random", "input", 0.3, 60.0), ("random", "input", 0.5, 80.0)]
    dense = pd.DataFrame(rows, columns=["pruning", "pruning_gates", "pruning_budget", "score_percent"])
    dense = dense.assign(
        dataset="easy", metric="accuracy", backbone="b", method="dense", gates="none", budget=1.0
    )
    ours = {"dataset": "easy", "metric": "accuracy", "method": "ar", "gates": "input", "split": "test"}
    score = pd.DataFrame([ours | figure2.DEFAULTS | {"budget": 0.3, "score_percent": 85.0}])
    same = {"dataset": "easy", "backbone": "b", "metric": "accuracy"}
    bag = pd.DataFrame([same | {"split": "test", "score_percent": 80.0}])
    lost = figure_gates.lost(dense, score, bag)
    assert lost.set_index(["method", "place"])["points"].to_dict() == {
        ("random", "input"): 30.0,
        ("ar", "input"): 5.0,
    }
    assert (
        lost["learnt"].all()
        and not figure_gates.lost(dense, score, bag.assign(score_percent=99.0))["learnt"].any()
    )


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (["sst2"], ""),
        (["sst2", "facts"], "The task facts is the project's own. "),
        (["haystack", "sst2", "facts"], "The tasks facts and haystack are the project's own. "),
    ],
)
def test_captions_name_the_tasks_that_no_paper_has(tasks, words):
    assert models.own_tasks(pd.DataFrame({"dataset": tasks})) == words


def test_first_sentences_say_the_ends_of_a_range_and_nothing_where_there_is_no_record():
    same = {"dataset": "d", "backbone": "b", "gates": "input", "split": "test", "metric": "accuracy"}
    swept = pd.DataFrame([{**figure2.DEFAULTS, "score_percent": 80.0, "seed": 0}]).assign(**same, budget=0.3)
    swept = pd.concat([swept, swept.assign(temperature=0.4, score_percent=78.5)])
    swept = pd.concat([swept, swept[:1].assign(stretch_high=1.3, score_percent=80.5)])
    swept = pd.concat([swept, swept[:1].assign(seed=1, score_percent=81.0)])  # the default is 80.5, then
    assert figure2.spans(swept).to_dict() == {("d", 0.3): 2.0}

    gates = pd.DataFrame({"budget": [0.5, 0.5], "budget_tokens": [50.0, 100.0]})
    gates = gates.assign(counted_tokens=[40.0, 100.0], open_tokens=[60.0, 120.0])
    assert figureC.counts(gates).to_dict("records") == [{"budget": 0.5, "counted": 45.0, "open": 60.0}]

    def score(method, value, budget=0.3, dataset="d"):
        row = {**same, "method": method, "budget": budget, "score_percent": value, "dataset": dataset}
        return row | {"seed": 0, "measured_examples": 400, "items_hash": None, "items_right": None}

    rows = [score("dense", 80.0, 1.0), score("ar", 60.0), score("dense", 50.0, 1.0, "cuad")]
    rows += [score("ar", 55.0, dataset="cuad"), score("ar_joint", 58.0), score("ar_fixed", 61.0)]
    records = pd.DataFrame(rows)
    bag = pd.DataFrame({**same, "dataset": ["cuad"], "score_percent": [60.0]})
    assert table1._kept(records, bag, 30) == (
        "With 30 % of the tokens, Adaptive Retention keeps 75 % (d, at the input) of the dense model's "
        "score. Dev items count where records hold them. Left out of this: cuad, where the dense model is "
        "more than 5 points below a bag of words. "
    )
    assert table1._kept(records[records["method"] == "ar"], bag, 30) == ""
    assert table3._changes(records) == (
        "An ablation changes the score by -2.0 points (without alternating optimization, d, 30 %) to +1.0 "
        "points (with a fixed multiplier, d, 30 %), dev items counted where records hold them. "
    )
    assert table3._changes(records[records["method"] == "ar"]) == ""

    timed = {"dataset": "d", "method": "ar", "length_tokens": 8, "dense_batch_ms": 20.0, "budget": [0.3, 0.5]}
    timed |= {"batch_ms": 10.0, "peak_memory_bytes": 30.0, "dense_peak_memory_bytes": 100.0}
    speed = pd.DataFrame(timed)
    fast = "With 30 % of the tokens, inference is 2.00 times as fast as dense"
    assert table4._saved(speed) == f"{fast} and saves 70 % of the peak memory. "
    assert table4._saved(speed.assign(peak_memory_bytes=math.nan)) == f"{fast}. "
    assert table4._saved(speed.assign(method="h2o")) == ""
    assert tableI._saved(speed.assign(method="h2o")) == ""
