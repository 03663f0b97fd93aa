"""The measurements around epsilon: pruned mass, slack, sweep, block size, long context, and the command."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from acp_repro import sweep_epsilon
from acp_repro.attention import logit_bound_from_norms, pruning_threshold, reference
from acp_repro.attention.boundary import count_blocks, find_boundary_serial
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.model import FoXConfig, FoXForCausalLM, save_pretrained
from acp_repro.model.capture import AttentionInputs, attention_inputs
from acp_repro.model.loss import IGNORED_LABEL
from acp_repro.papers.acp.measure import pruned_mass
from acp_repro.papers.acp.measure.pruned_ratio import measure_block_size, measure_epsilon_sweep
from acp_repro.papers.acp.paper import PAPER
from acp_repro.papers.acp.task import FoXTask
from acp_repro.papers.acp.trained import PassSettings, TrainedFoX, one_pass
from acp_repro.pipeline.data.text_checkpoint import TextCheckpoint, labelled_batches
from tests.suites import YAML, with_measure
from tests.test_heads import small_model

RUN = "pro-tiny-256-acp"
LONGER = YAML.replace("context_length: [128]", "context_length: [256]").replace(
    "micro_batch_tokens: 128", "micro_batch_tokens: 256"
)
SMALL = PassSettings("float32", "small")
TOLERANCES = [-1.0, -5.0, -10.0, -20.0, -40.0]


def random_inputs(seed: int, tolerance: float, length: int = 200) -> AttentionInputs:
    """Three heads of increasing locality with thresholds from their norms."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, length, 16, generator=generator) for _ in range(3))
    gates = torch.rand(2, 3, length, generator=generator) * torch.tensor([0.01, 0.5, 4.0])[:, None]
    bound = logit_bound_from_norms(q, k)
    return AttentionInputs(q, k, v, -gates, pruning_threshold(bound, length, tolerance))


def dense_mass(inputs: AttentionInputs, threshold: torch.Tensor, block_q: int, block_k: int):
    """Pruned mass of all rows at once, with the serial search."""
    length = inputs.q.shape[2]
    c = cumulative_log_fgate(inputs.log_fgate)
    boundary = find_boundary_serial(c, threshold, length, block_q, block_k)
    kept = reference.kept_entries(boundary, length, length, block_q, block_k)
    return reference.pruned_mass(inputs.q, inputs.k, inputs.log_fgate, kept, sm_scale=0.25)


@pytest.mark.parametrize(("block_q", "block_k"), [(1, 1), (16, 32), (64, 64), (64, 16)])
def test_chunked_row_mass_matches_dense_and_stays_below_epsilon(block_q, block_k, monkeypatch):
    inputs = random_inputs(0, -3.0)
    expected = dense_mass(inputs, inputs.threshold, block_q, block_k)
    for numbers in (1, 2**19):  # chunks of one query block, and one chunk
        monkeypatch.setattr(pruned_mass, "_CHUNK_NUMBERS_CPU", numbers)
        mass = pruned_mass.pruned_row_mass(inputs, block_q, block_k)
        missing = mass.isnan()
        assert torch.equal(missing, expected == 0) and not missing.all()
        torch.testing.assert_close(mass[~missing], expected[~missing], rtol=1e-12, atol=0)
        assert (mass[~missing] < math.exp(-3.0)).all()


def by_hand(length: int) -> AttentionInputs:
    """One head, all scores 0, every gate e^-1, delta = -5: weights are proportional to e^-(i - j)."""
    zeros = torch.zeros(1, 1, length, 16)
    gates = torch.full((1, 1, length), -1.0)
    return AttentionInputs(zeros, zeros, zeros, gates, torch.tensor([-5.0]))


@pytest.mark.parametrize(
    ("length", "block", "epsilon", "slack"),
    [
        # Rows (1), (.269, .731), (.090, .245, .665). Row 1 cannot spare key 0 (D = -1), and row 2 can
        # spare key 0 (D = -2) but not key 1 (D = -1): delta may rise to -1.
        (3, 1, 0.1, 4.0),
        # Nor can row 2 spare key 0: delta may rise to its D = -2.
        (3, 1, 0.05, 3.0),
        # Every row can spare all but the diagonal: delta may be 0.
        (3, 1, 0.4, 5.0),
        # Blocks of 2: rows 2 and 3 would lose .335 and .118 with keys 0 and 1, decay c_2 - c_1 = -1.
        (4, 2, 0.33, 4.0),
        (4, 2, 0.34, 5.0),
        # An odd end: query block 1 is row 2 alone.
        (3, 2, 0.33, 4.0),
    ],
)
def test_slack_matches_a_hand_computation(length, block, epsilon, slack):
    found = pruned_mass.threshold_slack(by_hand(length), block, block, math.log(epsilon))
    assert found.item() == pytest.approx(slack, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tolerance", [-10.0, -3.0, -0.5])
def test_slack_is_the_largest_safe_value(seed, tolerance, monkeypatch):
    monkeypatch.setattr(pruned_mass, "_CHUNK_NUMBERS_CPU", 2**14)
    inputs, grid = random_inputs(seed, tolerance), (16, 8)
    slack = pruned_mass.threshold_slack(inputs, *grid, tolerance)
    delta = inputs.threshold.double()
    assert (slack >= 0).all() and (slack <= -delta).all()
    at_most = dense_mass(inputs, delta + slack - 1e-9, *grid).amax(-1)
    above = dense_mass(inputs, delta + slack + 1e-9, *grid).amax(-1)
    assert (at_most < math.exp(tolerance)).all()
    reached = slack < -delta - 1e-6
    assert reached.any() and (above[reached] >= math.exp(tolerance)).all()


def small_batches(rows: int = 2, length: int = 320) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))
    return [(row[None], row.roll(-1)[None]) for row in ids]


def test_one_pass_returns_the_mean_loss_over_labelled_tokens():
    model, batches, layers = small_model(), small_batches(), []
    loss, tokens = one_pass(model, batches, SMALL, lambda layer, _: layers.append(layer), "")
    with torch.no_grad():
        each = torch.cat([model.loss_per_token(*batch) for batch in batches])
    assert loss == pytest.approx(each.double().mean().item(), rel=1e-9) and tokens == 640
    for _, labels in batches:
        labels[:, 100:] = -100
    loss, tokens = one_pass(model, batches, SMALL, lambda *_: None, "")
    assert loss == pytest.approx(each[:, :100].double().mean().item(), rel=1e-9) and tokens == 640
    assert layers == [0, 1, 0, 1]  # the first call no longer observes the model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swept_mass_grows_with_epsilon_and_stays_below_it(dtype):
    model = small_model(log_pruning_tolerance=None)
    rows = measure_epsilon_sweep(model, small_batches(), PassSettings(dtype, "small"), TOLERANCES)
    assert model.config.log_pruning_tolerance is None
    assert {tuple(row) for row in rows} == {PAPER.metric("epsilon_sweep").columns}
    frame = pd.DataFrame(rows)
    assert frame["swept_log_pruning_tolerance"].tolist() == TOLERANCES
    for column in ("block_pruned_ratio", "token_pruned_ratio", "largest_pruned_mass"):
        assert frame[column].is_monotonic_decreasing
    assert (frame["token_pruned_ratio"] >= frame["block_pruned_ratio"]).all()
    assert (frame["block_pruned_ratio"] > 0).all()
    assert (frame["largest_pruned_mass"] < np.exp(frame["swept_log_pruning_tolerance"])).all()
    exact, _ = one_pass(model, small_batches(), PassSettings(dtype, "small"), lambda *_: None, "")
    # Other loss differences come from epsilon and rounding, which is larger in bfloat16.
    assert frame["loss_nats"].to_numpy() == pytest.approx(exact, abs=1e-3)


@pytest.fixture
def trained(make_suite):
    """A run of a tiny suite with the weights of `small_model`."""
    suite = make_suite(LONGER)
    suite = with_measure(suite, sweep_tokens=600)
    run = suite.run(RUN)
    return TrainedFoX(suite, run, FoXTask(run), small_model(), torch.device("cpu"), 0)


def test_pruned_mass_of_every_head(trained):
    rows = trained.on_heldout(pruned_mass.measure_pruned_mass, "sweep_tokens")
    assert {frozenset(row) for row in rows} == {frozenset(PAPER.metric("pruned_mass").columns)}
    masses, slacks = {}, {}
    for input_ids, _ in trained.heldout_batches(600, 1):
        for layer, inputs in enumerate(attention_inputs(trained.model, input_ids)):
            mass = pruned_mass.pruned_row_mass(inputs, 64, 64)[0]
            slack = pruned_mass.threshold_slack(inputs, 64, 64, -10.0)[0]
            for head in range(2):
                masses.setdefault((layer, head), []).append(mass[head])
                slacks.setdefault((layer, head), []).append(slack[head].item())
    assert [(row["layer"], row["head"]) for row in rows] == sorted(masses)
    for row in rows:
        mass = torch.cat(masses[row["layer"], row["head"]])
        mass = mass[~mass.isnan()].numpy()
        assert row["measured_rows"] == 512 and row["rows_with_pruning"] == len(mass)
        assert row["threshold_slack_nats"] == min(slacks[row["layer"], row["head"]])
        if not len(mass):
            assert row["largest_pruned_mass"] is None and row["pruned_ratio"] == 0
            continue
        assert row["largest_pruned_mass"] == mass.max() < math.exp(-10)
        assert row["median_pruned_mass"] == pytest.approx(np.median(mass))
        assert row["q90_pruned_mass"] <= row["q99_pruned_mass"] <= row["largest_pruned_mass"]
        assert row["threshold_nats"] < -10 - math.log(256)
    # 4 x 4 blocks, of which 10 are causal; local heads keep the diagonal and its neighbour.
    assert [row["pruned_ratio"] for row in rows] == [0.3, 0.0, 0.3, 0.0]


def test_block_size_sweep_matches_the_serial_count_and_decreases(trained):
    rows = trained.on_heldout(measure_block_size, "sweep_tokens")
    assert [row["block_tokens"] for row in rows] == [1, 16, 32, 64, 128, 256]
    ratios = [row["pruned_ratio"] for row in rows]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 0.4 and ratios[-1] == 0
    for row in rows:
        block, total = row["block_tokens"], []
        assert set(row) == set(PAPER.metric("block_size").columns) and row["measured_tokens"] == 512
        for input_ids, _ in trained.heldout_batches(600, 2):
            for inputs in attention_inputs(trained.model, input_ids):
                c = cumulative_log_fgate(inputs.log_fgate)
                threshold = inputs.threshold.expand(c.shape[:2])
                boundary = find_boundary_serial(c, threshold, 256, block, block)
                total.append(count_blocks(boundary, 256, 256, block, block).pruned_ratio)
        assert row["pruned_ratio"] == pytest.approx(torch.cat(total).mean().item())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_pretrained(small_model(), folder / "fox")
    (folder / "text.txt").write_text("what a fox forgets, a dog remembers; " * 30)
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 256, 1000))
    return folder


@pytest.mark.parametrize("source", [("--text", "text.txt"), ("--token-ids", "tokens.npy")])
def test_checkpoint_command_writes_its_measurements(checkpoint, source):
    csv = checkpoint / "out" / "sweep.csv"
    words = ["--context-length", "320", "--log-pruning-tolerance", "-2", "-10.5", "--csv", str(csv)]
    assert sweep_epsilon.main([str(checkpoint / "fox"), source[0], str(checkpoint / source[1]), *words]) == 0
    frame = pd.read_csv(csv)
    assert tuple(frame.columns[:6]) == PAPER.metric("epsilon_sweep").columns
    assert (frame["largest_pruned_mass"] < np.exp([-2, -10.5])).all()
    assert (frame["context_length_tokens"] == 320).all() and (frame["measured_tokens"] == 960).all()


def test_model_without_forget_gate_is_refused(tmp_path, capsys):
    rope = FoXConfig.rope(vocab_size=257, hidden_size=64, num_hidden_layers=1, num_heads=2)
    save_pretrained(FoXForCausalLM(rope), tmp_path / "rope")
    assert sweep_epsilon.main([str(tmp_path / "rope")]) == 2
    assert "has no forget gate to prune by" in capsys.readouterr().err


def test_last_tokens_of_checkpoint_batches_have_no_loss(checkpoint):
    ids = TextCheckpoint(checkpoint / "fox").input_ids(256, 700, text=checkpoint / "text.txt")
    ((inputs, labels),) = labelled_batches(ids, torch.device("cpu"))
    assert torch.equal(inputs, ids) and torch.equal(labels[:, :-1], ids[:, 1:])
    assert (labels[:, -1] == IGNORED_LABEL).all()
