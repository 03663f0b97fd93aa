"""Figures 1, 3 to 6, 8 and 11 and their statistics, from synthetic results; torch is not needed."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.acp import figure3, figure4, statistics
from tests.analysis import synthetic
from tests.suites import YAML

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


# --- statistics, by hand


def of_heads(pruned: list[int], causal: int, length: int = 256) -> pd.DataFrame:
    blocks = pd.DataFrame({"pruned_blocks": pruned, "causal_blocks": causal, "context_length_tokens": length})
    blocks["pruned_ratio"] = blocks["pruned_blocks"] / causal
    return blocks.assign(block_q_tokens=64, block_k_tokens=64)


def test_savings_use_the_bins_of_the_paper():
    # 5 % is in the second bin, 90 % in the 19th and 100 % in the last.
    found = figure4.savings_bins(of_heads([0, 1, 18, 20, 10], 20, 65_536))
    assert found.tolist() == [0, 1, 18, 19, 10] and figure4.BINS == 20
    # The grid allows 30 %, an edge: what is there is left of it, and what a closed gate takes past it is not.
    assert figure4.savings_bins(of_heads([0, 5, 6, 7], 20)).tolist() == [0, 5, 5, 7]


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
    more = pd.concat([table, curve(None, [3.1, 2.5, 1.2], seed=1)])
    # An unpaired seed has no difference.
    pd.testing.assert_frame_equal(statistics.loss_differences(more), statistics.loss_differences(table))
    # The paired seed gives two pairs with one gap each; their mean would hide the larger gap.
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
def test_grid_of_figure_1_matches_the_code(block_q):
    head = pd.DataFrame(decay_rows(0.1, 0, 0, block_q))
    grid = statistics.block_grid(head, 16)
    c = head["cumulative_log_fgate_nats"].to_numpy()
    bias = np.where(np.tri(256, dtype=bool), c[:, None] - c, -np.inf)
    blocks = bias.reshape(256 // block_q, block_q, 4, 64).max((1, 3))
    causal = np.isfinite(blocks)
    assert np.array_equal(causal, ~np.isnan(grid.largest_decay))
    assert np.allclose(grid.largest_decay[causal], blocks[causal])
    assert grid.last.tolist() == (causal.sum(1) - 1).tolist()
    # Blocks left of the boundary are below delta and the block at the boundary is not.
    assert len(grid.first_kept) == len(blocks)
    for row, first in enumerate(grid.first_kept):
        assert (blocks[row, :first] < -10).all() and blocks[row, first] >= -10


def test_boundary_is_a_staircase_in_token_coordinates():
    x, y = statistics.staircase(np.array([0, 0, 0, 2, 2, 4]))
    assert list(zip(x, y, strict=True)) == [(0, 0), (0, 3), (2, 3), (2, 5), (4, 5), (4, 6)]


# --- figures


def test_head_figures_are_plotted_from_results(make_suite):
    make_suite(SUITE)
    decay = decay_rows(1, 0, 2) + decay_rows(0.1, 1, 0) + decay_rows(0.001, 1, 3)
    synthetic.write(HEADS_RUN, "decay", *decay)
    synthetic.write(
        HEADS_RUN,
        "attention_weights",
        *[
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
    synthetic.write(
        HEADS_RUN,
        "pruned_ratio",
        *[
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
    for name in ("figure1", "figure4", "figure5", "figure6"):
        synthetic.draw(name)
        assert Path("figures/mini", f"{name}.png").is_file()


def test_spread_between_seeds():
    same = [3.0, 2.0, 1.0]
    pairs = ((-10.0, same, 0), (None, same, 0), (-10.0, same, 1), (None, [3.0, 2.1, 1.0], 1))
    records = pd.concat([curve(tolerance, losses, seed=seed) for tolerance, losses, seed in pairs])
    assert figure3.seeds_apart(records)["big"].tolist() == pytest.approx([0.0, 0.1, 0.0])
