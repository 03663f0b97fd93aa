"""`python -m acp_repro.inspect`: values against dense matrices, output, and rejected inputs."""

import numpy as np
import pandas as pd
import pytest
import torch

from acp_repro import train as train_command
from acp_repro.attention.boundary import count_blocks, find_boundary
from acp_repro.attention.reference import decay_bias
from acp_repro.common.grid import head_kind, largest_pruned_ratio
from acp_repro.explorer.heads import inspect_heads
from acp_repro.inspect import main as inspect
from acp_repro.model import load_pretrained, save_pretrained
from acp_repro.model.capture import attention_inputs
from tests.suites import write_suite
from tests.test_heads import small_model

RUN = "runs/mini/pro-tiny-128-acp"
LENGTH = 256

COLUMNS = (
    "layer head pruned_ratio largest_pruned_ratio token_pruned_ratio kind median_window_tokens "
    "q90_window_tokens mean_forget_gate logit_bound threshold_nats context_length_tokens measured_tokens "
    "block_q_tokens block_k_tokens log_pruning_tolerance"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a trained run of ours, and a model in the authors' format."""
    folder = tmp_path_factory.mktemp("inspect")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_suite(folder)
        assert train_command.main(["--suite", "mini", "--run", "pro-tiny-128-acp"]) == 0
        save_pretrained(small_model(), "official")
        yield folder


@pytest.mark.parametrize("architecture", ["pro", "llama"])
def test_inspect_matches_the_dense_matrices(architecture):
    model = small_model(architecture)
    batches = [torch.randint(0, 257, (2, LENGTH)), torch.randint(0, 257, (1, LENGTH))]
    table = inspect_heads(model, batches)
    assert " ".join(table.columns) == COLUMNS and len(table) == 4
    seen = [attention_inputs(model, batch) for batch in batches]
    for row in table.itertuples():
        windows, pruned_blocks, gates, thresholds = [], 0, [], []
        for layers in seen:
            inputs = layers[row.layer]
            delta = inputs.threshold.expand(inputs.q.shape[:2])[:, row.head]
            decay = decay_bias(inputs.log_fgate, LENGTH)[:, row.head]
            windows += (decay >= delta[:, None, None]).sum(-1).flatten().tolist()
            largest_of_block = decay.unflatten(1, (-1, 64)).unflatten(3, (-1, 64)).amax((2, 4))
            causal = largest_of_block > -torch.inf
            pruned_blocks += int((causal & (largest_of_block < delta[:, None, None])).sum())
            gates += inputs.log_fgate[:, row.head].exp().flatten().tolist()
            thresholds += delta.tolist()
        assert row.pruned_ratio == pruned_blocks / (3 * 10)  # 4 x 4 blocks, 10 of them causal
        assert row.token_pruned_ratio == pytest.approx(1 - sum(windows) / (3 * LENGTH * (LENGTH + 1) / 2))
        for share, value in ((0.5, row.median_window_tokens), (0.9, row.q90_window_tokens)):
            assert value == np.quantile(windows, share, method="inverted_cdf")
        assert row.mean_forget_gate == pytest.approx(np.mean(gates), rel=1e-6)
        assert row.threshold_nats == pytest.approx(min(thresholds))
        assert row.logit_bound == pytest.approx(
            (-min(thresholds) - np.log(LENGTH) - 10) / 2, rel=1e-5, abs=1e-5
        )
    assert (table["measured_tokens"] == 3 * LENGTH).all()
    assert table["kind"].tolist() == ["local", "global"] * 2


def test_inspect_restores_the_model_and_uses_the_papers_epsilon_for_exact_ones():
    model, ids = small_model(log_pruning_tolerance=None), torch.randint(0, 257, (1, LENGTH))
    before = model(ids)
    table = inspect_heads(model, [ids])
    assert (table["log_pruning_tolerance"] == -10).all()
    assert model.config.log_pruning_tolerance is None and torch.equal(model(ids), before)
    wider = inspect_heads(model, [ids], log_pruning_tolerance=-40)
    assert (wider["median_window_tokens"] >= table["median_window_tokens"]).all()
    with pytest.raises(ValueError, match="equally long"):
        inspect_heads(model, [ids, ids[:, :-1]])
    assert model.config.log_pruning_tolerance is None


def test_head_kinds_and_limits_match_a_hand_computation():
    # 8 x 8 blocks: of 36 causal ones, 8 on the diagonal and 7 beside it stay.
    assert largest_pruned_ratio(512, 64, 64) == 21 / 36
    assert largest_pruned_ratio(128, 64, 64) == 0.0
    for length, block_q, block_k in ((512, 64, 64), (1000, 128, 64), (1000, 64, 128), (65, 64, 64)):
        c = -torch.arange(length, dtype=torch.float64)[None, None]  # two keys per query exceed the threshold
        boundary = find_boundary(c, torch.full((1, 1), -1.0), length, block_q, block_k)
        expected = float(count_blocks(boundary, length, length, block_q, block_k).pruned_ratio)
        assert largest_pruned_ratio(length, block_q, block_k) == pytest.approx(expected)
    assert head_kind(20 / 36, 21 / 36) == "local" and head_kind(19 / 36, 21 / 36) == "intermediate"
    assert head_kind(0.05, 1.0) == "intermediate" and head_kind(0.04, 1.0) == "global"
    assert head_kind(0.0, 0.0) is None


def test_run_folder_provides_its_text_and_length(folder):
    assert inspect([RUN, "--csv", "out/heads.csv", "--tokens", "300"]) == 0
    table = pd.read_csv(folder / "out" / "heads.csv")
    assert " ".join(table.columns) == COLUMNS and (table["context_length_tokens"] == 128).all()


def test_folder_in_the_authors_format_accepts_any_text_and_writes_a_page(folder):
    (folder / "prose.txt").write_text("to forget is to keep what matters. " * 100)
    np.save(folder / "ids.npy", np.arange(2000, dtype=np.uint16).reshape(2, 1000) % 257)
    arguments = [
        "official",
        "--context-length",
        "256",
        "--tokens",
        "512",
        "--sort",
        "layer",
        "--csv",
        "x.csv",
    ]
    for text in ([], ["--text", "prose.txt"], ["--token-ids", "ids.npy"]):
        assert inspect([*arguments, *text]) == 0
        assert pd.read_csv("x.csv")["kind"].tolist() == ["local", "global"] * 2
    table, ids = pd.read_csv("x.csv"), torch.from_numpy(np.load("ids.npy").astype(np.int64))[0, :512]
    expected = inspect_heads(load_pretrained("official"), [ids.view(2, 256)])
    pd.testing.assert_frame_equal(table, expected, check_dtype=False)
    save_pretrained(small_model(log_pruning_tolerance=None), "exact/model")
    pages = ["--token-ids", "ids.npy", "--html", "out/page.html", "--compare", "exact/model"]
    assert inspect([*arguments, *pages]) == 0
    pd.testing.assert_frame_equal(pd.read_csv("x.csv"), table)
    assert (folder / "out" / "page.html").is_file()
