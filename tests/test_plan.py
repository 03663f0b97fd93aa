"""Plans are compared with real models and the paper's model names."""

from pathlib import Path

import pytest
import torch

from acp_repro.model import FoXForCausalLM
from acp_repro.papers.acp.cost import run_cost, states_bytes
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.plan import main
from tests.suites import YAML

ROOT = Path(__file__).parent.parent


def test_parameter_counts_match_the_paper_sizes(monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = load_suite("paper").runs
    assert len(runs) == 36
    for run in runs:
        cost = run_cost(run, "h100", 1)
        assert cost.parameters / 1e6 == pytest.approx(float(run.size_name.removesuffix("M")), rel=0.03)
        assert cost.tokens == run.size.tokens == cost.steps * 2**19  # the budgets are whole steps


def test_context_parallelism_matches_a_hand_computation(make_suite, capsys):
    yaml = YAML.replace("[128]", "[1024]").replace("micro_batch_tokens: 128", "micro_batch_tokens: 1024")
    yaml = yaml.replace("256,", "2048,", 1).replace("1536", "4096").replace("float32", "bfloat16")
    alone = [run_cost(run, "h100", 2) for run in make_suite(yaml).runs]
    shared = make_suite(yaml.replace("bfloat16", "bfloat16, context_parallel: 2"))
    acp, exact = (run_cost(run, "h100", 2) for run in shared.runs)
    # Two layers, 2048 tokens of a step, two heads: gates forward; 3/4 of keys, values and gradients.
    gates, keys = 2 * 2048 * 2 * 4, 2 * 2048 * 0.75 * (2 * 32 * (2 + 4) + 2 * 4)
    assert exact.exchanged == gates + keys and acp.exchanged == pytest.approx(gates + 0.3 * keys)
    assert all(cost.exchanged == 0 for cost in alone)
    assert acp.memory < exact.memory < alone[1].memory
    assert main(["--suite", "mini", "--nproc", "2"]) == 0
    assert "sent GB" in capsys.readouterr().out


def test_memory_plan_matches_a_hand_computation_and_a_real_step(make_suite):
    run, other = make_suite().runs
    acp, exact = run_cost(run, "h100", 1), run_cost(other, "h100", 1)
    model = FoXForCausalLM(run.model_config(257))
    assert acp.parameters == sum(p.numel() for p in model.parameters()) - 257 * 32  # the embedding
    assert (acp.steps, acp.tokens) == (6, 1536)
    # Scores and weighted sum, over half of the square, forward and twice backward, two layers.
    attention = 1536 * 3 * 2 * 4 * 32 * 129 / 2
    assert acp.flops == exact.flops == exact.executed_flops
    assert acp.flops - acp.executed_flops == pytest.approx(0.7 * attention)
    assert exact.gpu_hours == pytest.approx(exact.flops / (0.3 * 989e12) / 3600)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64, dtype=torch.long), labels=torch.zeros(1, 64, dtype=torch.long)).mean().backward()
    optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    size = sum(t.numel() * t.element_size() for t in tensors if t.dim())
    assert states_bytes(run, model.config, 1) == size  # float32: no copies
