"""Figure A7: which factors change the pruned ratio by its criterion."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest

from acp_repro.pipeline.suite_file import load_suite
from analysis.acp import figureA7

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.chdir(PROJECT)
    suite = load_suite("h200-ablations")
    return dataclasses.replace(suite, runs=suite.runs + suite.skip_runs).ablations


def records(runs, percents):
    """Two heads per run: one prunes its maximum, the other the rest of ``percents``."""
    return pd.DataFrame(
        {
            "run": run.name,
            "layer": 0,
            "head": head,
            "pruned_blocks": blocks,
            "causal_blocks": 1000,
            "pruned_ratio": blocks / 1000,
            "context_length_tokens": 4096,
            "block_q_tokens": 64,
            "block_k_tokens": 64,
        }
        for run, percent in zip(runs, percents, strict=True)
        for head, blocks in enumerate((1000, round(20 * percent) - 1000))
    )


def test_factor_counts_past_four_points_and_twice_the_gap_between_seeds(runs):
    table = figureA7.shares(records(runs, [77, 78, 71, 74, 82, *[77.5] * 3]), runs)
    assert table["moved_points"].round(1).tolist() == [-0.5, 0.5, -6.5, -3.5, 4.5, 0, 0, 0]
    assert figureA7.counts(table).to_numpy().nonzero()[0].tolist() == [2, 4]
    far = figureA7.shares(records(runs, [76, 79, 71, 74, 82, *[77.5] * 3]), runs)  # seeds 3 points apart
    assert figureA7.counts(far).to_numpy().nonzero()[0].tolist() == [2]
    one, percents = [runs[0], *runs[2:]], [77, 60, 74, 82, *[77.5] * 3]
    assert not figureA7.counts(figureA7.shares(records(one, percents), one)).any()  # no second seed
