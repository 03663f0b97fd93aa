"""Losses, decay and attention weights of tiny runs, compared with plain formulas."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
import torch.nn.functional as F

from acp_repro import train as train_command
from acp_repro.attention.boundary import find_boundary_serial
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.measure import main as measure
from acp_repro.model.capture import AttentionInputs, attention_inputs
from acp_repro.papers.acp.measure import heads, losses, pruned_mass, speed
from acp_repro.papers.acp.measure.heads import Head, choose_heads
from acp_repro.papers.acp.measure.pruned_ratio import measure_pruned_ratio
from tests.suites import YAML, records, slow_every_other, trained_run, write_suite

ACP, EXACT, LONG = "pro-tiny-128-acp", "pro-tiny-128-exact", "pro-tiny-256-acp"
SUITE = (
    YAML.replace("context_length: [128]", "context_length: [128, 256]")
    .replace("micro_batch_tokens: 128", "micro_batch_tokens: 256")
    .replace("loss_tokens: 256", "loss_tokens: 700")
)


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory):
    """A working folder with two paired runs, one run at twice the length, and their results."""
    folder, before = tmp_path_factory.mktemp("heads"), os.getcwd()
    os.chdir(folder)
    write_suite(folder, SUITE)
    try:
        names = [word for name in (ACP, EXACT, LONG) for word in ("--run", name)]
        assert train_command.main(["--suite", "mini", "--jobs", "1", *names]) == 0
        assert measure(["loss", "loss_curve", "--suite", "mini", *names]) == 0
        yield folder
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", [ACP, EXACT, LONG])
def test_losses_equal_plain_cross_entropy_of_the_same_text_at_every_length(name):
    trained = trained_run(name)
    assert (trained.model.config.log_pruning_tolerance is None) == (name == EXACT)
    length = trained.run.context_length
    # 700 tokens contain two full pieces of 256 at both lengths: the first 512 bytes of the document.
    text = list(Path("heldout.txt").read_bytes()[:512])
    labels = torch.tensor(text).view(-1, length)
    bos = torch.full((len(labels), 1), trained.model.config.vocab_size - 1)
    with torch.no_grad():
        logits = trained.model(torch.cat((bos, labels[:, :-1]), 1)).double()
    losses = F.cross_entropy(logits.mT, labels, reduction="none").mean(0)
    record = records("loss", name)
    assert record["measured_tokens"].tolist() == [512]
    assert record["loss_nats"].tolist() == pytest.approx([losses.mean().item()], rel=1e-5)
    curve = records("loss_curve", name)
    assert curve["position"].tolist() == list(range(50, length - 50))
    assert (curve["window_tokens"] == 101).all() and (curve["measured_tokens"] == 512).all()
    for position, value in zip(curve["position"], curve["loss_nats"], strict=True):
        assert value == pytest.approx(losses[position - 50 : position + 51].mean().item(), rel=1e-5)


def test_long_curve_is_thinned():
    def stand_in(length):
        losses = torch.arange(length, dtype=torch.float64)
        return SimpleNamespace(once=lambda _: (losses, 7), run=SimpleNamespace(name="a-run"))

    rows = losses.measure_loss_curve(stand_in(16384))
    positions = [row["position"] for row in rows]
    assert positions[:2] == [50, 66] and positions[-1] <= 16384 - 51 and len(rows) <= 1024
    # The mean over a window of a straight line is its midpoint.
    assert [row["loss_nats"] for row in rows] == positions


def test_heads_are_selected_by_savings():
    savings = {Head(0, 0): 0.9, Head(0, 1): 0.95, Head(1, 0): 0.05, Head(1, 1): 0.4, Head(2, 0): 0.1}
    nothing = dict.fromkeys(savings, 0.0)
    # Halfway between 0.95 and 0.05 is 0.5.
    three = [Head(0, 1), Head(1, 1), Head(1, 0)]
    assert choose_heads(savings, nothing) == three
    # One more if it is nearest to half of the 8 initially pruned blocks.
    start = nothing | {Head(0, 1): 8.0, Head(0, 0): 5.0}
    assert choose_heads(savings, start) == [Head(0, 1), Head(0, 0), Head(1, 1), Head(1, 0)]
    assert choose_heads(savings, start | {Head(1, 1): 4.0}) == three


def test_decay_and_weights_match_the_model():
    trained = trained_run(LONG)
    for block in trained.model.model.layers:  # so that one head of each layer forgets immediately
        torch.nn.init.constant_(block.attn.fgate_proj.bias[:1], -3.0)
    ratios = {
        Head(r["layer"], r["head"]): r["pruned_ratio"]
        for r in trained.on_heldout(measure_pruned_ratio, "pruned_ratio_tokens")
    }
    table = pandas.DataFrame(heads.measure_decay(trained))
    weights = pandas.DataFrame(heads.measure_attention_weights(trained))
    chosen = list(dict.fromkeys(zip(table["layer"], table["head"], strict=True)))
    # At 256 tokens, the first blocks are all blocks.
    assert chosen == choose_heads(ratios, ratios) and table["pruned_ratio"].iloc[0] > 0.2

    ((input_ids, _),) = trained.heldout_batches(256, 1)
    layers = attention_inputs(trained.model, input_ids)
    for (layer, head), rows in table.groupby(["layer", "head"]):
        inputs = layers[layer]
        c = inputs.log_fgate[:, head].double().cumsum(-1)
        assert rows["position"].tolist() == list(range(256))
        assert rows["cumulative_log_fgate_nats"].tolist() == pytest.approx(c[0].tolist(), abs=1e-9)
        delta = float(inputs.threshold.expand(1, 2)[0, head])
        assert rows["threshold_nats"].unique().tolist() == [delta]
        block = int(rows["block_q_tokens"].iloc[0])
        n_m = find_boundary_serial(c[None], torch.tensor([[delta]]), 256, block, block)[0, 0]
        expected = n_m.repeat_interleave(block) * block
        assert rows["first_kept_key_position"].tolist() == expected.tolist()
        causal = (256 // block) * (256 // block + 1) // 2
        assert rows["pruned_ratio"].unique().tolist() == [int(n_m.sum()) / causal]

        scores = inputs.q[0, head].double() @ inputs.k[0, head].double().T / math.sqrt(16)
        scores = scores + c[0][:, None] - c[0][None, :]
        a = scores.masked_fill(torch.ones(256, 256).triu(1).bool(), -math.inf).softmax(-1)
        mine = weights[(weights["layer"] == layer) & (weights["head"] == head)]
        where = (a > 0.1).nonzero()
        assert mine[["query_position", "key_position"]].to_numpy().tolist() == where.tolist()
        values = a[tuple(where.T)].tolist()
        assert mine["attention_weight"].tolist() == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_weights_are_independent_of_the_row_chunking(rows, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 65, 16, generator=generator) * 2 for _ in range(3))
    log_fgate = F.logsigmoid(torch.randn(1, 1, 65, generator=generator))
    inputs = AttentionInputs(q, k, v, log_fgate, None)
    whole = list(heads.large_weights(inputs))
    monkeypatch.setattr(pruned_mass, "_CHUNK_NUMBERS_CPU", 65 * rows)
    cut = list(heads.large_weights(inputs))
    assert [entry[:2] for entry in cut] == [entry[:2] for entry in whole]
    assert [e[2] for e in cut] == pytest.approx([e[2] for e in whole], rel=1e-12)
    assert whole[0] == (0, 0, 1.0)  # the first query attends only to itself


def test_pruned_ratio_equals_the_serial_count_over_the_heldout_text():
    trained = trained_run(ACP)
    table = pandas.DataFrame(trained.on_heldout(measure_pruned_ratio, "pruned_ratio_tokens")).set_index(
        ["layer", "head"]
    )
    expected = torch.zeros(2, 2, dtype=torch.int64)
    for input_ids, _ in trained.heldout_batches(256, 2):
        for layer, inputs in enumerate(attention_inputs(trained.model, input_ids)):
            c = cumulative_log_fgate(inputs.log_fgate)
            threshold = inputs.threshold.expand(c.shape[:2])
            expected[layer] += find_boundary_serial(c, threshold, 128, 64, 64).sum((0, 2))
    for layer in range(2):
        for head in range(2):
            row = table.loc[(layer, head)]
            assert row["pruned_blocks"] == expected[layer, head]
            assert row["causal_blocks"] == 3 * 2  # two sequences of two by two blocks
    assert (table["measured_tokens"] == 256).all()


@pytest.mark.parametrize(
    ("measure_speed", "columns"),
    [
        (speed.measure_attention_time, ["forward_ms", "backward_ms"]),
        (speed.measure_throughput, ["throughput_tokens_per_s"]),
    ],
)
def test_measurement_order_is_balanced(monkeypatch, measure_speed, columns):
    trained = trained_run(ACP)
    slow_every_other(monkeypatch)
    acp, exact = measure_speed(trained)
    assert [acp[name] for name in columns] == pytest.approx([exact[name] for name in columns])
