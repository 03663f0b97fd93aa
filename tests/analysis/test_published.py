"""Internal contradictions of the papers."""

from analysis.retention.naming import PUBLISHED

TABLE = PUBLISHED.table.set_index(["item", "method", "quantity"])["low"]


def test_threshold_row_repeats_h2o():
    threshold = TABLE["table3"]["Threshold instead of top-M"].drop(["throughput", "memory"])
    h2o = {"50": TABLE["table1"]["H2O"], "30": TABLE["table2"]["H2O"]}
    same = [value == h2o[name[-2:]][name[:-3]] for name, value in threshold.items()]
    assert (sum(same), len(same)) == (10, 18)


def test_times_of_a_thousand_tokens_are_twice_those_of_a_batch():
    times = TABLE["table4"].unstack()
    assert (times["seconds_per_1k_tokens"] == 2 * times["batch_seconds"]).all() and len(times) == 4
