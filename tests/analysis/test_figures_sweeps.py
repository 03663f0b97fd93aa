"""Figures 7, A1 and A2 from synthetic results, with the numbers in their captions."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from analysis import drawing, style
from analysis.acp import figure7, figureA1, figureA2, sweeps
from analysis.tables import UnfitRecords
from tests.analysis import synthetic
from tests.suites import write_suite

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
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_suite(tmp_path)
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


def test_figure7_shows_savings_losses_and_masses_in_order_of_epsilon():
    left, right = figure7.draw(records_of("epsilon_sweep", SWEEP)).axes
    entries, blocks = (line for line in left.lines if len(line.get_xdata()) == 3)
    assert blocks.get_xdata().tolist() == [-40, -10, -1]
    assert blocks.get_ydata().tolist() == [0, 50, 60]
    assert entries.get_ydata().tolist() == pytest.approx([10, 60, 70])
    bound, mass = (line for line in right.lines if len(line.get_xdata()) == 3)
    assert bound.get_ydata().tolist() == pytest.approx(np.exp([-40, -10, -1]).tolist())
    assert np.isnan(mass.get_ydata()[0]) and mass.get_ydata()[2] == 1e-4
    excluded = right.collections[0].get_paths()[0].vertices[:, 1]  # from the bound up to all of the weight
    assert (excluded.min(), excluded.max()) == pytest.approx((math.exp(-40), 1))


def test_figureA1_sorts_heads_by_their_largest_mass():
    curve = figureA1.draw(records_of("pruned_mass", MASS)).axes[0].lines[1]
    assert curve.get_ydata().tolist() == pytest.approx([(10 + math.log(300)) / math.log(10), 30])


def test_figureA2_shows_the_maximum_of_each_grid():
    most, measured = figureA2.draw(records_of("block_size", BLOCKS)).axes[0].lines
    assert measured.get_xdata().tolist() == [1, 16, 64]
    assert measured.get_ydata().tolist() == pytest.approx([90, 70, 25])
    # 128 tokens in blocks of 16: 36 causal blocks, of which 8 + 7 stay.
    assert most.get_ydata()[1] == pytest.approx(100 * 21 / 36) and most.get_ydata()[2] == 0


def test_interval_is_plotted_from_end_to_end():
    ax = drawing.forest({"a": (1.0, -2.0, 3.0), "b": 2.0}, "nats").axes[0]
    drawn = [(line.get_xdata()[:], line.get_ydata()[:]) for line in ax.lines[:4]]
    assert [(list(x), list(y)) for x, y in drawn] == [([-2, 3], [0, 0]), ([1], [0]), ([2], [1]), ([2], [1])]


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
    texts = [style.epochs(passes * 89e6, "h100") for passes in (1.9, 2, 4.5)]
    assert texts == ["", ", 2.0 epochs", ", 4.5 epochs"] and style.epochs(1e12, "mini") == ""
