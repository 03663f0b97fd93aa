"""A run goes on bit for bit after any stop, and refuses what it should refuse."""

import itertools
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from acp_repro import train as train_command
from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.suite import TrainingConfig, load_suite
from acp_repro.training import checkpoint as checkpoint_module
from acp_repro.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from acp_repro.training.loop import TrainingError, is_done, num_steps, train
from acp_repro.training.optimizer import learning_rate_factor, make_optimizer
from tests.suites import YAML, write_suite

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACP_REPRO_CACHE", raising=False)
    write_suite(tmp_path)
    return load_suite("mini").run("pro-tiny-128-acp")


def weights(run):
    return load_file(run.folder / "model" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_resumed_run_gives_the_same_bits(run, capsys):
    train(run, device=CPU)
    expected, folder = weights(run), run.folder
    assert is_done(run) and not (folder / "checkpoints").exists()
    done = json.loads((folder / "done.json").read_text())
    assert done["tokens"] == 1536 and math.isfinite(done["loss_nats_last_20th"])
    settings = json.loads((folder / "run.json").read_text())
    assert settings["settings"]["training"]["batch_tokens"] == 256 and settings["versions"]["torch"]

    shutil.rmtree(folder)
    for stop in (1, 2, 5, None):
        train(run, device=CPU, stop_after=stop)
        assert is_done(run) == (stop is None)
    assert same(weights(run), expected)
    steps = [json.loads(x)["step"] for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(num_steps(run)))
    assert "going on from step 5" in capsys.readouterr().out


def test_a_done_run_is_left_alone(run, capsys):
    train(run, device=CPU)
    before = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    assert train_command.main(["--suite", "mini", "--run", run.name]) == 0
    assert "done already" in capsys.readouterr().out
    assert (run.folder / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_kill_between_checkpoint_and_metrics_repeats_no_line(run):
    train(run, device=CPU, stop_after=3)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss_nats": 1.0}\n{"step": 4, "lo')  # cut short by a kill
    train(run, device=CPU)
    steps = [json.loads(x)["step"] for x in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(num_steps(run)))


def test_a_corrupt_checkpoint_is_passed_over_and_said_so(run, capsys):
    train(run, device=CPU)
    expected = weights(run)
    shutil.rmtree(run.folder)
    train(run, device=CPU, stop_after=4)
    newest = run.folder / "checkpoints" / "step-00000004.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    train(run, device=CPU)
    out = capsys.readouterr().out
    assert "step-00000004.safetensors: corrupt" in out and "going on from step 3" in out
    assert same(weights(run), expected)


def test_foreign_and_wholly_corrupt_checkpoints_are_refused(run):
    train(run, device=CPU, stop_after=2)
    folder = run.folder / "checkpoints"
    assert len(list(folder.glob("step-*"))) == 2
    for path in folder.glob("step-*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact; delete the folder"):
        train(run, device=CPU)
    shutil.rmtree(folder)
    save_checkpoint(folder, 1, {"model.other": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="of another model"):
        train(run, device=CPU)


def test_a_full_disk_leaves_the_last_good_checkpoint(run, monkeypatch):
    train(run, device=CPU, stop_after=2)
    folder = run.folder / "checkpoints"

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device; step 2 is intact"):
            train(run, device=CPU)
    assert not list(folder.glob(".*"))
    step, _ = load_checkpoint(folder, pytest.fail)
    assert step == 2
    train(run, device=CPU)
    assert is_done(run)


def test_changed_settings_are_refused_with_the_difference(run, tmp_path, capsys):
    train(run, device=CPU, stop_after=1)
    write_suite(tmp_path, YAML.replace("learning_rate: 1e-2", "learning_rate: 2e-2"))
    with pytest.raises(TrainingError, match=r"size.learning_rate: 0.01, now 0.02.*rm -r runs/mini"):
        train(load_suite("mini").run(run.name), device=CPU)
    assert train_command.main(["--suite", "mini", "--run", run.name]) == 1
    assert "error: runs/mini/pro-tiny-128-acp was begun with other" in capsys.readouterr().err
    # When checkpoints are written changes nothing about the weights.
    write_suite(
        tmp_path, YAML.replace("checkpoint_every_seconds: 0", "checkpoint_every_seconds: 9")
    )
    train(load_suite("mini").run(run.name), device=CPU)


def test_a_second_process_on_the_same_run_is_refused(run):
    import fcntl

    run.folder.mkdir(parents=True)
    with (run.folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match="another process is training this run"):
            train(run, device=CPU)


def test_a_loss_that_is_not_finite_stops_the_run_by_name(run, monkeypatch):
    train(run, device=CPU, stop_after=2)
    loss = FoXForCausalLM.loss_per_token
    monkeypatch.setattr(FoXForCausalLM, "loss_per_token", lambda *a: loss(*a) * torch.nan)
    with pytest.raises(TrainingError, match=r"step 2 gave loss nan .*gradients.*model\."):
        train(run, device=CPU)


def test_a_missing_corpus_is_one_line(run, tmp_path, capsys):
    (tmp_path / "text.txt").unlink()
    assert train_command.main(["--suite", "mini"]) == 1
    assert "text.txt" in capsys.readouterr().err
    assert not (run.folder / "model").exists()


def test_weight_decay_is_on_matrices_only():
    model = FoXForCausalLM(
        FoXConfig.pro(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_heads=2)
    )
    optimizer = make_optimizer(model, TrainingConfig(), 1e-3)
    decayed, plain = optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {p.dim() for p in plain["params"]} == {1} and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_schedule_is_linear_then_cosine_to_zero():
    config = TrainingConfig(batch_tokens=10, micro_batch_tokens=10, warmup_tokens=40)
    factors = [learning_rate_factor(t, 1040, config) for t in range(0, 1050, 10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[54] == pytest.approx(0.5)
    assert factors[-1] == pytest.approx(0.0) and min(factors) >= 0
    assert all(a >= b for a, b in itertools.pairwise(factors[3:]))
