"""Full training steps on random tokens: results, unchanged weights, and the arithmetic of the figure."""

import pandas as pd
import pytest
import torch

from acp_repro.benchmark_training import main as command
from acp_repro.papers.acp.measure import training_steps
from acp_repro.papers.acp.paper import PAPER
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.suite_file import load_suite
from analysis.acp import table_scaling

CPU = torch.device("cpu")


@pytest.fixture
def run(make_suite):
    return make_suite().runs[0]


def test_training_steps_measure_both_methods_without_changing_weights(run, monkeypatch):
    made = []
    real = training_steps._ours
    monkeypatch.setattr(training_steps, "_ours", lambda *args: made.append(real(*args)) or made[-1])
    acp, exact = training_steps.time_steps(run, 301, CPU, repeats=2, steps=1, official=False)
    shape = {"architecture", "size", "context_length_tokens"}
    assert set(acp) == {*shape, *PAPER.metric("training_step").columns}
    assert (acp["method"], exact["method"]) == ("acp", "exact") and acp["vocab_size"] == 301
    assert acp["step_tokens"] == run.training.micro_batch_tokens and acp["ranks"] == 1
    for record in (acp, exact):
        rate = 1e3 * record["step_tokens"] / record["step_ms"]
        assert record["throughput_tokens_per_s"] == pytest.approx(rate) and rate > 0
    gate = made[0].blocks[0].attn.fgate_proj
    assert (gate.weight == 0).all() and made[0].model.lm_head.weight.shape[0] == 301
    nats = torch.nn.functional.logsigmoid(gate.bias)
    assert nats.tolist() == pytest.approx([-0.2, -1e-4], rel=1e-3)  # of two heads, one is local


def test_every_number_of_ranks_is_measured_into_one_result(run, monkeypatch):
    launched = []

    def ranks(number, module, arguments):
        launched.append((number, arguments[-1]))
        assert module == "acp_repro.benchmark_training"
        return command(arguments)

    monkeypatch.setattr("acp_repro.pipeline.training.distributed.launch_ranks", ranks)
    words = ["--suite", "mini", "--vocab-size", "301", "512", "--nproc", "1", "2", "--device", "cpu"]
    assert command([*words, "--parallel", "ddp", "fsdp", "--repeats", "1", "--steps", "1"]) == 0
    assert launched == [(1, "ddp"), (2, "ddp"), (2, "fsdp")]
    table = read_records(load_suite("mini"), "training_step")  # each launch here has one rank
    assert sorted(zip(table["vocab_size"], table["method"], strict=True)) == [
        *((301, "acp"), (301, "exact")),
        *((512, "acp"), (512, "exact")),
    ]


def test_scaling_is_relative_to_the_fewest_ranks():
    setting = {"architecture": "pro", "size": "125M", "context_length_tokens": 4096, "vocab_size": 50_257}
    rows = [
        {**setting, "implementation": name, "method": "acp", "ranks": n, "parallel": mode}
        | {"throughput_tokens_per_s": rate}
        for name, n, mode, rate in (
            ("triton", 4, "ddp", 360.0),
            ("triton", 1, "none", 100.0),
            ("official", 1, "none", 50.0),
            ("triton", 4, "fsdp", 380.0),
        )
    ]
    found = table_scaling.of_linear(pd.DataFrame(rows))
    assert found.set_index("parallel")["of_linear"].to_dict() == {"none": 1.0, "ddp": 0.9, "fsdp": 0.95}
