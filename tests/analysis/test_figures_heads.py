"""Figures 1, 3 to 6, 8 and 11 and their statistics, from records written by hand; no torch."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from acp_repro.common.grid import largest_pruned_ratio
from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite import load_suite
from analysis.acp import figure3, figure4, figure6, statistics
from tests.analysis import synthetic
from tests.suites import YAML, write_suite

SUITE = YAML
for before, after in (
    (
        "sizes:\n",
        "sizes:\n"
        "  big: {num_hidden_layers: 2, hidden_size: 64, head_dim: 16, tokens: 512, learning_rate: 1}\n",
    ),
    ("size: [tiny], context_length: [128]", "size: [tiny, big], context_length: [256, 512]"),
    ("batch_tokens: 256, micro_batch_tokens: 128", "batch_tokens: 512, micro_batch_tokens: 512"),
):
    assert before in SUITE
    SUITE = SUITE.replace(before, after)
HEADS_RUN = "pro-big-256-acp"


def record(name: str, quantity: str, rows: list[dict]) -> None:
    synthetic.write(name, quantity, *rows)


def read(quantity: str) -> pd.DataFrame:
    return read_records(load_suite("mini"), quantity, partial=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the suite and no record."""
    monkeypatch.chdir(tmp_path)
    write_suite(tmp_path, SUITE)
    return tmp_path


def write_curves(names: list[str]) -> None:
    """A straight line for ACP; exact lies 0.01 lower, and 0.03 at position 60."""
    for name in names:
        length, exact = int(name.split("-")[2]), name.endswith("exact")
        record(
            name,
            "loss_curve",
            [
                {
                    "position": p,
                    "window_tokens": 101,
                    "measured_tokens": 512,
                    "loss_nats": 3 - p / 1000 - exact * (0.03 if p == 60 else 0.01),
                }
                for p in range(50, length - 50, 2)
            ],
        )


def write_losses(names: list[str]) -> None:
    for name in names:
        record(name, "loss", [{"loss_nats": 3.0}])


def decay_rows(step: float, layer: int, head: int, block_q: int = 64) -> list[dict]:
    """256 tokens with the same gate; delta is -10 and key blocks are 64."""
    c = -step * np.arange(1, 257)
    first = np.arange(0, 256, block_q)
    kept = [sum(c[f] - c[k * 64 + 63] < -10 for k in range(f // 64)) for f in first]
    causal = sum((f + block_q - 1) // 64 + 1 for f in first)
    return [
        {
            "layer": layer,
            "head": head,
            "pruned_ratio": sum(kept) / causal,
            "position": p,
            "cumulative_log_fgate_nats": c[p],
            "threshold_nats": -10.0,
            "block_q_tokens": block_q,
            "block_k_tokens": 64,
            "first_kept_key_position": 64 * kept[p // block_q],
        }
        for p in range(256)
    ]


def write_heads() -> None:
    record(HEADS_RUN, "decay", decay_rows(1, 0, 2) + decay_rows(0.1, 1, 0) + decay_rows(0.001, 1, 3))
    record(
        HEADS_RUN,
        "attention_weights",
        [
            {
                "layer": layer,
                "head": head,
                "query_position": q,
                "key_position": q // 2,
                "attention_weight": 0.5,
            }
            for layer, head in ((0, 2), (1, 0), (1, 3))
            for q in range(256)
        ],
    )
    # On a grid of 4 by 4 blocks the most is 3 of 10: rows 2 and 3 prune 1 and 2.
    record(
        HEADS_RUN,
        "pruned_ratio",
        [
            {
                "layer": i // 4,
                "head": i % 4,
                "measured_tokens": 512,
                "block_q_tokens": 64,
                "block_k_tokens": 64,
                "pruned_blocks": pruned,
                "causal_blocks": 20,
                "pruned_ratio": pruned / 20,
            }
            for i, pruned in enumerate((6, 6, 6, 0, 6, 3, 0, 1))
        ],
    )


def make(name: str) -> str:
    """Draws an item of ``mini``; the caption in one line."""
    caption = synthetic.draw(name)
    picture = Path("figures/mini") / f"{name}.png"
    assert matplotlib.image.imread(picture).shape[0] > 300
    assert picture.with_suffix(".pdf").stat().st_size > 5000
    return caption


# --- statistics, by hand


def test_savings_fall_into_the_papers_bins():
    # 5 % opens the second bin, 95 % the last, and 100 % is in the last.
    shares = figure4.savings_shares([0, 1, 19, 20, 10], [20, 20, 20, 20, 20])
    assert shares[[0, 1, 10, 19]].tolist() == [0.2, 0.2, 0.2, 0.4] and shares.sum() == 1
    with pytest.raises(ValueError, match="no head"):
        figure4.savings_shares([], [])


@pytest.mark.parametrize(
    ("length", "block_q", "block_k", "share"),
    [
        (512, 64, 64, 21 / 36),  # 0 + 0 + 1 + ... + 6 of 1 + ... + 8
        (256, 128, 64, 1 / 6),  # two rows of 2 and 4 blocks; the second keeps blocks 1, 2 and 3
        (64, 64, 64, 0.0),
        (100, 64, 64, 0.0),  # the last row is short; its two blocks are the diagonal and its neighbour
    ],
)
def test_the_grid_sets_a_limit(length, block_q, block_k, share):
    assert largest_pruned_ratio(length, block_q, block_k) == pytest.approx(share)


def test_the_limit_is_what_strong_gates_reach_and_do_not_pass():
    head = pd.DataFrame(decay_rows(5, 0, 0))
    assert head["pruned_ratio"].iloc[0] == largest_pruned_ratio(256, 64, 64) == 0.3


def curve(tolerance, losses, length=256, seed=0):
    return pd.DataFrame(
        {
            "run": f"{tolerance}-{seed}",
            "architecture": "pro",
            "size": "big",
            "context_length_tokens": length,
            "seed": seed,
            "log_pruning_tolerance": tolerance,
            "position": range(len(losses)),
            "loss_nats": losses,
        }
    )


def test_curves_are_paired_position_by_position():
    table = pd.concat([curve(-10.0, [3.0, 2.0, 1.0]), curve(None, [3.1, 2.0, 1.2])])
    differences = statistics.loss_differences(table)
    assert differences["difference"].tolist() == pytest.approx([-0.1, 0.0, -0.2])
    (gap,) = statistics.largest_gaps(differences).itertuples()
    assert (gap.context_length_tokens, gap.position) == (256, 2)
    assert gap.gap_nats == pytest.approx(0.2)
    assert statistics.seed_gap(table) is None
    more = pd.concat([table, curve(None, [3.1, 2.5, 1.2], seed=1)])
    assert statistics.seed_gap(more) == pytest.approx(0.5)
    # A seed without its pair says nothing of the difference.
    pd.testing.assert_frame_equal(statistics.loss_differences(more), statistics.loss_differences(table))
    # With it there are two pairs, each with its own gap: the mean of both would hide the larger one.
    pairs = statistics.loss_differences(pd.concat([more, curve(-10.0, [3.0, 2.0, 1.0], seed=1)]))
    of_seed = pairs.groupby("seed")["difference"].apply(list).to_dict()
    assert of_seed == {0: pytest.approx([-0.1, 0.0, -0.2]), 1: pytest.approx([-0.1, -0.5, -0.2])}
    gaps = statistics.largest_gaps(pairs)
    assert gaps[["seed", "position"]].to_numpy().tolist() == [[0, 2], [1, 1]]
    assert gaps["gap_nats"].tolist() == pytest.approx([0.2, 0.5])
    for half in (table[:3], table[:-1]):
        with pytest.raises(ValueError, match="exact pair|one of exact"):
            statistics.loss_differences(half)


@pytest.mark.parametrize("block_q", [64, 128])
def test_the_grid_of_figure_1_is_the_codes(block_q):
    head = pd.DataFrame(decay_rows(0.1, 0, 0, block_q))
    grid = statistics.block_grid(head, 16)
    c = head["cumulative_log_fgate_nats"].to_numpy()
    bias = np.where(np.tri(256, dtype=bool), c[:, None] - c, -np.inf)
    blocks = bias.reshape(256 // block_q, block_q, 4, 64).max((1, 3))
    causal = np.isfinite(blocks)
    assert np.array_equal(causal, ~np.isnan(grid.largest_decay))
    assert np.allclose(grid.largest_decay[causal], blocks[causal])
    assert grid.last.tolist() == (causal.sum(1) - 1).tolist()
    # What is left of the boundary is under delta, and the block at the boundary is not.
    for row, first in enumerate(grid.first_kept):
        assert (blocks[row, :first] < -10).all() and blocks[row, first] >= -10


def test_the_boundary_is_a_staircase_in_token_coordinates():
    x, y = statistics.staircase(np.array([0, 0, 0, 2, 2, 4]))
    assert list(zip(x, y, strict=True)) == [(0, 0), (0, 3), (2, 3), (2, 5), (4, 5), (4, 6)]


# --- figures


def test_loss_figures_take_their_sizes_and_print_the_gap(folder):
    write_curves([run.name for run in load_suite("mini").runs])
    write_losses([run.name for run in load_suite("mini").runs])
    for name, size in (("figure3", "big"), ("figure8", "tiny")):
        caption = make(name)
        name = f"{size} (1.5k tokens, start of training)"
        assert f"{name}, 256: 0.0300 at 60; {name}, 512: 0.0300 at 60." in caption
        assert "FoX (Pro)" in caption and "Two seeds" not in caption
    assert "**Figure 8.**" in caption and "big" not in caption
    figure = figure3.draw(read("loss_curve"))
    words = [t.get_text() for ax in figure.axes for t in (ax.get_legend() or figure.legends[0]).texts]
    assert words.count("0.0300") == 4  # two sizes of two lengths
    assert {line.get_linestyle() for line in figure.axes[0].lines} == {"-", "--"}


def test_exact_heads_have_no_boundary_and_no_figure_1(folder):
    write_heads()
    exact = [
        {**row, "threshold_nats": None, "first_kept_key_position": 0, "pruned_ratio": 0.0}
        for row in decay_rows(0.1, 0, 0)
    ]
    record(HEADS_RUN, "decay", exact)
    with pytest.raises(RecordError, match="figure1 shows pruning, and pro-big-256-acp is exact"):
        make("figure1")
    figure = figure6.draw({q: read(q) for q in ("decay", "attention_weights")})
    assert not figure.axes[0].lines
