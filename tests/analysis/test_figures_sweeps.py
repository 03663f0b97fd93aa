"""Figures 7, A1 and A2 from synthetic results, with the numbers in their captions."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from analysis.acp import figure7, figureA1, figureA2, sweeps
from analysis.tables import UnfitRecords
from tests.analysis import synthetic

RUN = "pro-tiny-128-acp"
SWEEP = [
    {
        "swept_log_pruning_tolerance": value,
        "block_pruned_ratio": ratio,
        "measured_tokens": 256,
        "token_pruned_ratio": ratio + 0.1,
        "loss_nats": loss,
        "largest_pruned_mass": mass,
    }
    for value, ratio, loss, mass in (
        (-10.0, 0.5, 3.1, math.exp(-10) / 4000),
        (-1.0, 0.6, 3.1005, 1e-4),
        (-40.0, 0.0, 3.1, None),
    )
]
MASS = [
    {
        "layer": 0,
        "head": head,
        "measured_rows": 256,
        "rows_with_pruning": 100 if largest else 0,
        "threshold_nats": -20.0,
        "pruned_ratio": 0.5 if largest else 0.0,
        "largest_pruned_mass": largest,
        "q99_pruned_mass": median,
        "q90_pruned_mass": median,
        "median_pruned_mass": median,
        "threshold_slack_nats": slack,
    }
    for head, (largest, median, slack) in enumerate(
        [(1e-30, 0.0, 20.0), (math.exp(-10) / 300, 1e-9, 5.0), (None, None, 2.0)]
    )
]
BLOCKS = [
    {"block_tokens": block, "measured_tokens": 256, "pruned_ratio": ratio}
    for block, ratio in ((1, 0.9), (64, 0.25), (16, 0.7))
]
FIGURES = {
    "figure7": (figure7, "epsilon_sweep", SWEEP),
    "figureA1": (figureA1, "pruned_mass", MASS),
    "figureA2": (figureA2, "block_size", BLOCKS),
}


@pytest.fixture(autouse=True)
def folder(make_suite, tmp_path):
    make_suite()
    yield tmp_path
    plt.close("all")


def records_of(metric: str, rows: list[dict]) -> pd.DataFrame:
    """Writes ``rows`` as results of the suite's run and reads them back."""
    synthetic.write(RUN, metric, *rows)
    return read_records(load_suite("mini"), metric)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_plotted_from_results_only(name):
    module, metric, rows = FIGURES[name]
    records = records_of(metric, rows)
    with pytest.raises(UnfitRecords, match=f"{metric}: more than one record"):
        module.draw(pd.concat([records, records[:1]]))
    assert "nan" not in synthetic.draw(name)


def test_caption_numbers_match_a_hand_computation():
    sweep = pd.DataFrame(
        {"swept_log_pruning_tolerance": [-1.0, -2.0], "largest_pruned_mass": [np.exp(-3), np.nan]}
    )
    assert sweeps.bound_margins(sweep).iloc[0] == pytest.approx(math.exp(2))
    assert sweeps.bound_margins(sweep).isna().tolist() == [False, True]
    heads = pd.DataFrame(
        {
            "log_pruning_tolerance": -1.0,
            "largest_pruned_mass": [np.exp(-3), np.exp(-2)],
            "threshold_nats": [-20.0, -10.0],
            "threshold_slack_nats": [5.0, 10.0],
        }
    )
    assert sweeps.head_margins(heads).tolist() == pytest.approx([math.exp(2), math.e])
    assert sweeps.slack_shares(heads).tolist() == [0.25, 1.0]
