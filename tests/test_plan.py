"""A plan is right where it can be checked: against models, the paper's names, and finished runs."""

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from acp_repro import plan
from acp_repro.chain.records import write_records
from acp_repro.chain.state import measured_run
from acp_repro.chain.suite import load_suite
from acp_repro.model import FoXForCausalLM
from acp_repro.papers.acp.plan.cost import Assumptions, cost_of, memory_of
from acp_repro.papers.acp.plan.speed import Speeds
from tests.suites import YAML, write_suite

ROOT = Path(__file__).parent.parent
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def mini(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_suite(tmp_path)
    return load_suite("mini")


@pytest.fixture
def paper(monkeypatch):
    monkeypatch.chdir(ROOT)
    return load_suite("paper")


def test_sizes_of_the_paper_have_the_weights_of_their_names(paper):
    for run in paper.runs:
        cost = cost_of(run, Assumptions(), Speeds())
        named = float(run.size_name.removesuffix("M"))
        assert cost.parameters / 1e6 == pytest.approx(named, rel=0.03)
        assert cost.tokens == run.size.tokens == cost.steps * 2**19  # the budgets are whole steps


def test_one_run_by_hand(mini):
    acp, exact = (cost_of(r, Assumptions("h100", 1, 0.5, 0.75), Speeds()) for r in mini.runs)
    model = FoXForCausalLM(mini.runs[0].model_config(257))
    assert acp.parameters == sum(p.numel() for p in model.parameters()) - 257 * 32  # the embedding
    assert (acp.steps, acp.tokens) == (6, 1536)
    assert acp.nominal_flops == exact.nominal_flops == exact.executed_flops
    # Scores and weighted sum, over half of the square, forward and twice backward, two layers.
    attention = 1536 * 3 * 2 * 4 * 32 * 129 / 2
    assert acp.nominal_flops - acp.executed_flops == pytest.approx(0.75 * attention)
    assert exact.gpu_hours == pytest.approx(exact.executed_flops / (0.5 * 989e12) / 3600)
    assert exact.source == "50% MFU"


def test_states_are_those_of_a_model_after_a_step(mini):
    """Weights, gradients and AdamW's moments, counted on a real model."""
    run = mini.runs[0]
    config = run.model_config(257)
    model = FoXForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64, dtype=torch.long), labels=torch.zeros(1, 64, dtype=torch.long)).mean().backward()
    optimizer.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    size = sum(t.numel() * t.element_size() for t in tensors if t.dim())
    assert memory_of(run, config, "none", 1).states == size  # float32: no copies


def test_memory_follows_the_settings(paper):
    run = paper.run("pro-760m-4k-acp")
    config = run.model_config(50257)
    one, fsdp = memory_of(run, config, "none", 1), memory_of(run, config, "fsdp", 8)
    # Weights and moments in shards; weights and gradients whole until a step's last micro-batch.
    saved = (16 - 12 / 8 - 8) * config.num_parameters(non_embedding=False)
    assert one.states - fsdp.states == saved and fsdp.activations == one.activations
    assert one.activations_checkpointed < one.activations / 5
    assert one.peak == one.states + one.activations + one.logits
    # The logits of a micro-batch in bfloat16, and the head's gradient: never float32 logits.
    assert one.logits == 16_384 * 50_257 * 2 + 4 * 1536 * 50_257


def finished(run, device=H100, tokens_per_s=1000.0, ranks=2, **more):
    """The files that a finished run leaves, as far as a plan reads them."""
    run.folder.mkdir(parents=True)
    settings = {"settings": run.as_dict(), "device": device, "ranks": ranks}
    (run.folder / "run.json").write_text(json.dumps(settings))
    lines = [{"step": i, "throughput_tokens_per_s": tokens_per_s, **more} for i in range(6)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    done = {"tokens": 1536, "seconds": 1536 / tokens_per_s}
    (run.folder / "done.json").write_text(json.dumps(done))


def test_speeds_are_given_or_measured_on_the_same_shape_and_gpu(mini, capsys):
    acp, exact = mini.runs
    finished(acp)
    speeds = Speeds.find(mini, [f"{exact.name}=50"])
    assert speeds.of(acp, "h100") == (500.0, "runs/mini/pro-tiny-128-acp/metrics.jsonl")
    assert speeds.of(acp, "a100") is None and speeds.of(exact, "a100") == (50.0, "given")
    assert Speeds.find(mini, [], of_finished_runs=False).of(acp, "h100") is None
    write_suite(Path.cwd(), name="h100")
    run = (h100 := load_suite("h100")).runs[0]
    quantity = h100.paper.quantity("throughput")
    row = dict.fromkeys(quantity.columns, 1) | {"method": "exact", "throughput_tokens_per_s": 70}
    write_records(h100, run, quantity, [row], device=H100, dtype="float32", trained_tokens=1)
    found = Speeds.find(mini, [])
    other = dataclasses.replace(exact, data=dataclasses.replace(exact.data, tokenizer={"bpe": 300}))
    assert found.of(other, "h100") is None  # of another vocabulary
    assert found.of(exact, "h100") == (70.0, f"results/h100/{run.name}/throughput.csv")
    assert plan.main(["--suite", "mini", "--tokens-per-s", "pro-tiny=5"]) == 2
    assert "did you mean pro-tiny-128" in capsys.readouterr().err


def test_the_plan_is_the_papers_own(mini, capsys, monkeypatch):
    """Also of a paper that counts steps, too."""
    theirs = types.ModuleType("theirs")
    theirs.Assumptions, theirs.Speeds = Assumptions, Speeds
    theirs.cost_of = lambda *of: dataclasses.replace(cost_of(*of), steps=12_345)
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    paper = dataclasses.replace(mini.paper, plan="theirs", steps="theirs:steps")
    monkeypatch.setattr(plan, "load_suite", lambda name: dataclasses.replace(mini, paper=paper))
    assert plan.main(["--suite", "mini"]) == 0
    assert capsys.readouterr().out.count("12,345") == 2


def test_check_holds_the_plan_against_finished_runs(mini, capsys, tmp_path):
    assert plan.main(["--suite", "mini", "--check"]) == 1
    assert "no run of suite mini is finished" in capsys.readouterr().err
    finished(mini.runs[0], peak_memory_bytes=10**9)
    finished(mini.runs[1], device="some processor")
    file = tmp_path / "check.csv"
    given = f"{mini.runs[0].name}=250"
    assert plan.main(["--suite", "mini", "--check", "--tokens-per-s", given, "--csv", str(file)]) == 0
    on_gpu, on_cpu = csv.DictReader(file.open())
    # Two GPUs did 1,000 tokens a second, so 500 each; 250 were predicted.
    assert on_gpu["ratio"] == "0.50" and on_gpu["on"] == f"2 x {H100}"
    assert on_gpu["measured GB"] == "1.0" and float(on_gpu["ratio GB"]) > 100
    assert (on_cpu["ratio"], on_cpu["measured GB"], on_cpu["from"]) == ("-", "-", "-")
    # Without the run's folder, as in a clone, what was kept beside its records serves.
    run = mini.runs[0]
    took, quantity = measured_run(run), mini.paper.quantity("loss")
    for _ in range(2):  # and measured again where the folder is not
        row = {"measured_tokens": 1, "loss_nats": 1.0}
        write_records(mini, run, quantity, [row], device=H100, dtype="float32", trained_tokens=1)
        shutil.rmtree(run.folder, ignore_errors=True)
        assert measured_run(run) == took
    assert measured_run(dataclasses.replace(run, seed=1)) is None


def test_the_command_prints_every_run_and_the_totals_without_torch():
    code = "import sys; sys.modules['torch'] = None; from acp_repro.plan import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--suite", "paper", "--nproc", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert sum(line.startswith(("pro-", "llama-")) for line in lines) == 36
    assert "36 runs:" in lines[-2] and "GPU-hours" in lines[-2] and "989 TFLOP/s" in lines[-1]


def test_the_table_begins_with_the_run_and_ends_with_the_logits(mini, capsys):
    assert plan.main(["--suite", "mini"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()[1:]
    assert header.split()[0] == "run" and header.split()[-1] == "logits"
    assert lines[0].startswith("pro-tiny-128-acp  ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "abacus"], "--gpu abacus: not in the table"),
        (["--nproc", "3"], "pro-tiny-128-acp: a step of 2 micro-batches cannot be shared by 3"),
        (["--nproc", "0"], "--nproc 0: must be at least 1"),
        (["--mfu", "40"], "--mfu 40.0: must be above 0 and at most 1"),
        (["--pruned-ratio", "70"], "--pruned-ratio 70.0: must be from 0 to 1"),
        (["--tokens-per-s", "fast"], "--tokens-per-s fast"),
        (["--tokens-per-s", "pro-760m-16k-acp=0"], "write RUN=NUMBER"),
        (["--tokens-per-s", "pro-760m-16k-acp=nan"], "write RUN=NUMBER"),
        (["--suite", "nano"], "no such suite"),
    ],
)
def test_what_is_wrong_is_one_line(mini, capsys, arguments, message):
    assert plan.main(["--suite", "mini", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_vocabulary_from_a_tokenizer_file(mini, tmp_path, capsys):
    text = YAML.replace("{corpus: text,", "{tokenizer: {file: t.json}, corpus: text,")
    write_suite(tmp_path, text)
    assert plan.main(["--suite", "mini"]) == 2
    assert "t.json: holds no vocabulary; give its size with --vocab-size" in capsys.readouterr().err
    assert plan.main(["--suite", "mini", "--vocab-size", "300"]) == 0
    (tmp_path / "t.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    run = load_suite("mini").runs[0]
    assert cost_of(run, Assumptions(), Speeds()).parameters == run.model_config(3).num_parameters()
