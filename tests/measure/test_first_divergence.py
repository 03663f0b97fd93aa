"""Parallel training runs: the first diverging step and its cause."""

import json
from pathlib import Path

import pandas as pd

from acp_repro.measure import main
from acp_repro.papers.acp.measure import first_divergence
from tests.suites import YAML, train_run

# Long enough for blocks that can be pruned.
LONG = YAML.replace("[128]", "[512]").replace(
    "batch_tokens: 256, micro_batch_tokens: 128", "batch_tokens: 512, micro_batch_tokens: 512"
)


FORK = ["first_divergence", "--suite", "mini", "--device", "cpu"]


def test_runs_diverge_where_their_gradients_do(make_suite, monkeypatch):
    make_suite(LONG)
    monkeypatch.setattr(first_divergence, "TOLERANCES", (-0.001, -10_000.0))  # prune much and nothing
    monkeypatch.setattr(first_divergence, "MOST_STEPS", 3)
    monkeypatch.setattr(first_divergence, "LOOK_EVERY", 2)
    assert main(FORK) == 0
    file = Path("results/mini/pro-tiny-512-exact/first_divergence.csv.gz")
    assert file.read_bytes()[4:8] == bytes(4)  # no time stamp: equal results are written as identical bytes
    rows = pd.read_csv(file)
    strong, weak, repeat, perturbed = (
        rows[rows["training"] == name] for name in dict.fromkeys(rows["training"])
    )
    assert list(weak["step"]) == [0, 1, 2] and list(weak["tokens"]) == [512, 1024, 1536]

    # Nothing pruned, or a repetition: bitwise identical runs.
    apart = ["loss_difference_nats", "gradient_difference", "parameter_difference", "diverges_here"]
    assert not weak[apart].to_numpy().any() and not repeat[apart].to_numpy().any()
    assert (weak["pruned_ratio"].dropna() == 0).all()

    # Much pruned: the runs diverge at the first step, whose weights are still equal.
    first = strong.iloc[0]
    assert first["diverges_here"] == 1 and first["parameter_difference"] == 0 and first["pruned_ratio"] > 0
    assert 0 < first["largest_pruned_mass"] < 1 and first["gradient_difference"] > 0
    assert strong["diverges_here"].sum() == 1 and (strong["parameter_difference"][1:] > 0).all()
    assert strong["pruned_ratio"].notna().tolist() == [True, False, True]

    # One weight perturbed noticeably: the runs differ from the start.
    assert perturbed["diverges_here"].iloc[0] == 1
    assert (
        0 < perturbed["parameter_difference"].iloc[0] < 1e-3 and perturbed["largest_pruned_mass"].isna().all()
    )


def test_first_divergence_steps_match_train(make_suite, monkeypatch):
    run = make_suite().run("pro-tiny-128-exact")
    train_run(run, stop_after=2)
    logged = [json.loads(line)["loss_nats"] for line in (run.folder / "metrics.jsonl").open()]
    monkeypatch.setattr(first_divergence, "TOLERANCES", (-10_000.0,))
    monkeypatch.setattr(first_divergence, "MOST_STEPS", 2)
    assert main(FORK) == 0
    rows = pd.read_csv(f"results/mini/{run.name}/first_divergence.csv.gz")
    assert list(rows["loss_nats"][rows["training_log_pruning_tolerance"] == -10_000]) == logged
