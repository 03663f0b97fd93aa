"""Training: a resumed run is bitwise identical after any interruption, and invalid runs are refused."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from acp_repro import train as train_command
from acp_repro.attention import forgetting_attention
from acp_repro.common.artifacts import ArtifactError
from acp_repro.common.files import Locked, read_json, read_json_lines
from acp_repro.model import FoXConfig, FoXForCausalLM, load_pretrained
from acp_repro.model.fox import FoXBlock, FoXModel
from acp_repro.papers.acp.task import FoXTask, pruned_ratio_per_layer
from acp_repro.pipeline.data.text_checkpoint import TextCheckpoint
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training import run_folder as run_folder_module
from acp_repro.pipeline.training import trainer as trainer_module
from acp_repro.pipeline.training.prefetch import Prefetcher
from acp_repro.pipeline.training.run_folder import RunFolder, TrainingError, is_done, write_done
from acp_repro.pipeline.training.trainer import eager, warmup_and_cosine
from tests.suites import YAML, train_run, trained_run, write_suite
from tests.training.ranks import train_on

CPU = torch.device("cpu")


@pytest.fixture
def run(make_suite):
    return make_suite().run("pro-tiny-128-acp")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The weights of an uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("trained"))
        patch.delenv("ACP_REPRO_CACHE", raising=False)
        write_suite(folder)
        train_run(run := load_suite("mini").run("pro-tiny-128-acp"))
        return weights(run)


def weights(run):
    return load_file(run.folder / "model" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def log_of(run):
    return read_json_lines(run.folder / "metrics.jsonl")


def test_resumed_run_is_bitwise_identical(run, capsys):
    train_run(run)
    expected, folder = weights(run), run.folder
    assert is_done(run) and not (folder / "checkpoints").exists()
    assert read_json(folder / "done.json")["tokens"] == 1536
    about = read_json(folder / "run.json")
    assert about["settings"]["training"]["batch_tokens"] == 256 and about["versions"]["torch"]
    assert (about["ranks"], about["parallel"], about["compile"]) == (1, "none", False)

    shutil.rmtree(folder)
    for stop in (1, 2, 5, None):
        train_run(run, stop_after=stop)
        assert is_done(run) == (stop is None)
    assert same(weights(run), expected)
    assert [line["step"] for line in log_of(run)] == list(range(run.steps))
    assert "continuing from step 5" in capsys.readouterr().out
    (folder / "checkpoints" / "step-00000005").mkdir(parents=True)  # as left by a kill
    train_run(run)
    assert "already done" in capsys.readouterr().out and not (folder / "checkpoints").exists()


def test_training_matches_a_plain_adamw_loop(run, tmp_path):
    yaml = YAML.replace("[-10, null]", "[-10], seed: [3]")
    write_suite(tmp_path, yaml.replace("dtype: float32", "dtype: float32, max_grad_norm: 0.5"))
    run = load_suite("mini").run("pro-tiny-128-acp-seed3")
    train_run(run)
    lines = log_of(run)

    task = FoXTask(run)
    torch.manual_seed(3)
    model = task.build()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() == 1) == flat] for flat in (False, True))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    rates = (0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466)  # 512 tokens of warm-up, then a cosine to 0 at 1,536
    for step, (line, rate) in enumerate(zip(lines, rates, strict=True)):
        optimizer.zero_grad()
        losses = [task.loss(model, *task.batch(index)) / 2 for index in (2 * step, 2 * step + 1)]
        for loss in losses:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rate
        optimizer.step()
        assert (line["step"], line["tokens"]) == (step, 256 * (step + 1))
        assert line["learning_rate"] == pytest.approx(1e-2 * rate)
        assert line["loss_nats"] == pytest.approx(sum(losses).item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert norm > 0.5
    for name, weight in weights(run).items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-4)
    assert read_json(run.folder / "done.json")["loss_nats_last_20th"] == lines[-1]["loss_nats"]


def test_run_totals_match_the_log_lines(run):
    """Covers a resume with another number of ranks."""
    run.folder.mkdir(parents=True)
    common = {"tokens": 40, "loss_nats": 2.0}
    lines = [
        {"throughput_tokens_per_s": 10, "ranks": 1, "peak_memory_bytes": 7} | common,
        {"throughput_tokens_per_s": 5, "ranks": 4, "peak_memory_bytes": 3} | common,
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_done(run, 20, run.folder / "metrics.jsonl")
    done = read_json(run.folder / "done.json")
    assert (done["tokens"], done["seconds"], done["gpu_seconds"]) == (40, 6.0, 18.0)
    assert done["peak_memory_bytes"] == 7


def test_damaged_checkpoints_are_skipped_with_a_warning(run, trained, capsys):
    train_run(run, stop_after=4)
    newest = run.folder / "checkpoints" / "step-00000004"
    (newest / "other.safetensors").touch()  # would be loaded with the other files
    train_run(run, stop_after=3)
    assert not newest.exists()  # otherwise it would count as one of the two kept checkpoints
    train_run(run, stop_after=5)
    out = capsys.readouterr().out
    assert f"{newest} is missing, truncated or changed" in out and "continuing from step 3" in out
    for path in run.folder.glob("checkpoints/step-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TrainingError, match="no checkpoint is intact.*; delete the folder"):
        train_run(run)
    shutil.rmtree(run.folder / "checkpoints")
    train_run(run)
    assert same(weights(run), trained)


def test_checkpoints_and_weights_of_another_run_are_rejected(run, trained, tmp_path, capsys):
    """Covers weights of equal shapes, with which training would otherwise continue."""
    write_suite(tmp_path, YAML.replace("[-10, null]", "[-10], seed: [0, 1]"))
    other = load_suite("mini").run("pro-tiny-128-acp-seed1")
    train_run(run, stop_after=2)
    train_run(other, stop_after=3)
    checkpoints, foreign = run.folder / "checkpoints", other.folder / "checkpoints/step-00000003"
    shutil.copytree(foreign, checkpoints / foreign.name)
    train_run(run, stop_after=4)
    out = capsys.readouterr().out
    assert f"{checkpoints / foreign.name} was made from other inputs (settings); using an older" in out
    shutil.rmtree(checkpoints)
    shutil.copytree(foreign, checkpoints / foreign.name)
    with pytest.raises(TrainingError, match=f"{checkpoints}: no checkpoint is .*has these settings; delete"):
        train_run(run)
    shutil.rmtree(checkpoints)

    train_run(run)
    assert same(weights(run), trained)
    train_run(other)
    for name in ("model/model.safetensors", "done.json"):
        shutil.copyfile(other.folder / name, run.folder / name)
    assert not is_done(run)
    with pytest.raises(ArtifactError, match=r"acp/model/model.safetensors was made from other .*rm -r runs/"):
        train_run(run)
    with pytest.raises(ArtifactError, match=r"acp/model/model.safetensors was made from other inputs"):
        load_pretrained(run.folder)


def test_checkpoint_contains_only_safetensors(run):
    """Law 9: without pickles, nothing can be unpickled."""
    train_run(run, stop_after=1)
    (path,) = (run.folder / "checkpoints").iterdir()
    assert {f.name.partition("-")[0] for f in path.iterdir()} == {"shard", "manifest.json"}


def test_full_disk_keeps_the_last_valid_checkpoint(run, trained, monkeypatch):
    train_run(run, stop_after=2)
    folder = run.folder / "checkpoints"

    sync = os.fsync

    def full(descriptor):
        if "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        # torch syncs each file with the same call.
        patch.setattr("os.fsync", full)
        with pytest.raises(TrainingError, match="No space left on device; .*step-00000002"):
            train_run(run)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]
    train_run(run)
    assert same(weights(run), trained)


def die_at_a_sync():
    """Sends SIGKILL when the file or folder that matches DIE_AT is synced to disk."""
    sync = os.fsync

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        named = path.name == "checkpoints" and (path / "step-00000003").exists()
        if re.search(os.environ["DIE_AT"], f"{path} named" if named else str(path)):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = fsync


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="reads open files from /proc: run make test on Linux"
)
@pytest.mark.parametrize(
    ("die_at", "left"), [("step-00000003/shard-", 2), ("step-00000003$", 2), ("named", 3)]
)
def test_kill_during_a_checkpoint_resumes_from_the_previous_one(run, trained, capsys, die_at, left):
    ends = train_on(1, Path.cwd(), run.name, before=die_at_a_sync, environment={"DIE_AT": die_at})
    assert ends == [(-signal.SIGKILL, "killed")]
    names = {p.name for p in (run.folder / "checkpoints").iterdir()}
    assert (".step-00000003" in names, "step-00000003" in names) == (left == 2, left == 3)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss_nats": 1.0}\n{"step": 4, "lo')  # also after the checkpoint, and cut
    train_run(run)
    assert f"continuing from step {left}" in capsys.readouterr().out
    assert [line["step"] for line in log_of(run)] == list(range(run.steps))
    assert same(weights(run), trained)


def test_changed_settings_are_rejected_with_the_difference(run, tmp_path, capsys):
    train_run(run, stop_after=1)
    write_suite(tmp_path, YAML.replace("learning_rate: 1e-2", "learning_rate: 2e-2"))
    assert train_command.main(["--suite", "mini", "--run", run.name]) == 1
    error = capsys.readouterr().err
    assert re.search("^error: runs/mini/.*size.learning_rate: 0.01, now 0.02.*rm -r runs/mini", error, re.M)
    # The checkpoint schedule does not change the weights.
    write_suite(tmp_path, YAML.replace("checkpoint_every_seconds: 0", "checkpoint_every_seconds: 9"))
    train_run(load_suite("mini").run(run.name), stop_after=4)
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [
        "step-00000001",
        "step-00000004",
    ]


def test_run_resumes_after_the_code_gained_a_setting(run, monkeypatch, capsys):
    as_dict = type(run).as_dict

    def without_beta1(run):
        settings = as_dict(run)
        del settings["training"]["beta1"]
        return settings

    with monkeypatch.context() as patch:
        patch.setattr(type(run), "as_dict", without_beta1)
        train_run(run, stop_after=1)
    train_run(run, stop_after=2)
    assert "continuing from step 1" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, '{"settings": {"tr'])
def test_checkpoint_contains_the_settings_of_its_run(run, trained, tmp_path, text):
    train_run(run, stop_after=2)
    description = (run.folder / "run.json").read_bytes()
    for stop in (3, None):
        (run.folder / "run.json").unlink()
        if text is not None:
            (run.folder / "run.json").write_text(text)
        write_suite(tmp_path, YAML.replace("learning_rate: 1e-2", "learning_rate: 2e-2"))
        with pytest.raises(TrainingError, match="learning_rate: 0.01, now 0.02"):
            train_run(load_suite("mini").run(run.name))
        write_suite(tmp_path)
        train_run(run, stop_after=stop)
        assert (run.folder / "run.json").read_bytes() == description
    assert is_done(run) and same(weights(run), trained)


@pytest.mark.parametrize(("text", "steps"), [(None, None), ('{"settings": {"tr', 1)])
def test_folders_without_settings_are_not_modified(run, text, steps):
    train_run(run, stop_after=steps)
    if text is None:
        (run.folder / "run.json").unlink()
    for path in (run.folder / "run.json", *run.folder.glob("checkpoints/*/manifest.json")) if text else ():
        path.write_text(text)
    with pytest.raises(TrainingError, match=r"run.json is missing or damaged.*Copy it back.*rm -r runs/mini"):
        train_run(run)


@pytest.mark.parametrize("name", ["done.json", "model/model.safetensors"])
def test_damaged_finished_run_is_not_overwritten(run, name):
    train_run(run)
    (run.folder / name).write_bytes((run.folder / name).read_bytes()[:-1] + b"\0")
    before = (run.folder / "model" / "model.safetensors").read_bytes()
    with pytest.raises(ArtifactError, match=rf"{name} is missing.*rm -r runs/mini"):
        train_run(run)
    assert (run.folder / "model" / "model.safetensors").read_bytes() == before
    shutil.rmtree(run.model_folder)  # only the weights are deleted: they are recreated
    train_run(run)


def test_another_corpus_is_rejected(run, tmp_path):
    """With the same settings, and therefore the same tokenizer name."""
    train_run(run, stop_after=2)
    text = tmp_path / "text.txt"
    before = text.read_text()
    text.write_text(before.replace("fox", "cat"))
    with pytest.raises(TrainingError, match="started with other text .*Restore the text, or delete"):
        train_run(run)
    text.write_text(before)
    train_run(run)


def test_weights_are_renamed_last(run, trained, monkeypatch):
    """Make treats the weights as the sign of a finished run."""
    with monkeypatch.context() as patch:
        patch.setattr(run_folder_module, "write_done", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_run(run)
    assert not run.model_folder.exists()
    train_run(run)
    assert is_done(run) and same(weights(run), trained)


def test_run_finished_by_another_process_is_not_retrained(run, monkeypatch):
    train_run(run)
    before = (run.folder / "metrics.jsonl").read_bytes()
    answers = iter((False,))  # before the other process wrote its weights
    monkeypatch.setattr(run_folder_module, "is_done", lambda run: next(answers, True))
    assert train_run(run) == run.folder
    assert (run.folder / "metrics.jsonl").read_bytes() == before


def test_second_process_on_the_same_run_is_rejected(run):
    import fcntl

    run.folder.mkdir(parents=True)
    with (run.folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Locked, match="another process is training this run"):
            train_run(run)


@pytest.mark.parametrize(
    ("spoil", "device", "said"),
    [
        (
            FoXModel,
            "cpu",
            "step 2 gave loss nan and gradient norm nan; .* good checkpoint is .*step-00000002$",
        ),
        (FoXBlock, "cpu", "log_fgate must"),  # a NaN in one block reaches the gates of the next
        pytest.param(FoXModel, "cuda", "step 2 gave loss nan", marks=pytest.mark.gpu),
    ],
)
def test_nan_loss_stops_the_run(run, monkeypatch, spoil, device, said):
    """In the loss, and in the attention of a CPU, which rejects it."""
    train_run(run, device, stop_after=2)
    forward = spoil.forward
    monkeypatch.setattr(spoil, "forward", lambda self, *given: forward(self, *given) * torch.nan)
    with pytest.raises((TrainingError, ValueError), match=said):
        train_run(run, device)
    assert [line["step"] for line in log_of(run)] == [0, 1]
    assert not is_done(run) and not run.weights_file.exists()


def test_metrics_are_json_if_a_value_is_not_finite(run):
    with RunFolder(run).open_log(0) as write:
        write({"step": 0, "pruned_ratio": [math.nan, 0.5, math.inf]})
    assert log_of(run) == [{"step": 0, "pruned_ratio": [None, 0.5, None]}]


def test_non_finite_gradient_stops_the_run(run, monkeypatch):
    """The loss itself is still finite."""
    step = trainer_module.train_step
    monkeypatch.setattr(
        trainer_module, "train_step", lambda *a, **k: (step(*a, **k)[0], torch.tensor(math.inf))
    )
    with pytest.raises(TrainingError, match="step 0 gave loss 5.* and gradient norm inf"):
        train_run(run)


def test_metrics_contain_the_monitored_quantities(run):
    for stop in (3, None):
        train_run(run, stop_after=stop, watch_every=2)
    lines = log_of(run)
    assert [x["step"] for x in lines if "pruned_ratio" in x] == [0, 2, 3, 4]  # a resume logs its first step
    assert len(lines[0]["pruned_ratio"]) == 2 and all(0 <= x["data_wait_share"] <= 1 for x in lines)
    train_run(exact := load_suite("mini").run("pro-tiny-128-exact"))
    assert "pruned_ratio" not in (exact.folder / "metrics.jsonl").read_text()


def test_tokenizer_is_saved_with_the_weights(run, tmp_path):
    text = YAML.replace("heldout: [heldout.txt]", "heldout: [heldout.txt], tokenizer: {bpe: 300}")
    write_suite(tmp_path, text, "bpe")
    bpe = load_suite("bpe").run("pro-tiny-128-acp")
    weights = train_run(bpe) / "model"
    trained_run(bpe.name, "bpe")
    words = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(words.replace("fox", "cat"))
    with pytest.raises(TrainingError, match="trained on other text .*another tokenizer"):
        trained_run(bpe.name, "bpe")
    moved = weights.rename(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "runs")
    ids = TextCheckpoint(moved).input_ids(16, 64, text="heldout.txt")
    assert ids.shape == (4, 16)


def test_schedule_is_linear_then_cosine_to_zero():
    factors = [warmup_and_cosine(t, 10, 40, 1040) for t in (0, 20, 30, 35, 540, 1040, 1100)]
    assert factors == pytest.approx([0.25, 0.75, 1.0, 1.0, 0.5, 0.0, 0.0])


def test_pruned_ratio_of_each_layer_is_logged_only_with_acp():
    torch.manual_seed(0)
    model = FoXForCausalLM(FoXConfig.pro(vocab_size=19, hidden_size=32, num_hidden_layers=3, num_heads=2))
    ids = torch.arange(256).remainder(19)[None]
    with torch.no_grad():
        for layer, bias in enumerate((-3.0, -0.5, 8.0)):  # local, less local, global
            model.model.layers[layer].attn.fgate_proj.bias.fill_(bias)
    with eager(ids.device, "float32"), torch.no_grad():
        ratios = pruned_ratio_per_layer(model, ids)
    # Of ten blocks of 64 x 64, a local head keeps the four on the diagonal and their three neighbours.
    assert ratios == pytest.approx([0.3, 0.3, 0.0])
    model.set_log_pruning_tolerance(None)
    assert pruned_ratio_per_layer(model, ids) == []


def test_prefetched_batches_match_a_plain_loop():
    def load(index):
        return torch.tensor([index]), torch.tensor([1 // (12 - index)])

    batches = Prefetcher(load, range(3, 20, 3), "cpu", depth=2)
    assert [next(batches)[0].item() for _ in range(3)] == [3, 6, 9]
    with pytest.raises(ZeroDivisionError):  # at its position
        next(batches)
    assert next(batches, None) is None


def test_official_kernels_train_a_run(make_suite, monkeypatch):
    official = Mock(wraps=forgetting_attention)
    train_run(ours := make_suite().run("pro-tiny-128-acp"))
    expected = weights(ours)
    text = YAML.replace("dtype: float32", "dtype: float32, implementation: official")
    run = make_suite(text, "theirs").run("pro-tiny-128-acp")
    with pytest.raises(SuiteError, match="kernels cannot be imported .*install github.com"):
        train_run(run)
    monkeypatch.setattr("acp_repro.papers.acp.task.find_official", lambda: official)
    train_run(run)
    assert official.called and same(weights(run), expected)
