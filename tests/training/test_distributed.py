"""Distributed training with gloo on a CPU: the result does not depend on the number of ranks."""

import functools
import itertools
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from acp_repro.common.files import read_json, read_json_lines
from acp_repro.model import swiglu
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training import distributed, trainer
from acp_repro.pipeline.training.distributed import DistributedError, check_ranks
from acp_repro.pipeline.training.run_folder import is_done
from acp_repro.pipeline.training.trainer import compiled_blocks
from tests.suites import YAML, train_run, write_suite
from tests.training.ranks import train_on

NAME = "pro-tiny-128-acp"
# Four micro-batches per step, five steps.
YAML_4 = YAML.replace("batch_tokens: 256", "batch_tokens: 512").replace("1536", "2560")


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """The run in a separate working folder, with additional settings under ``training``."""
    monkeypatch.delenv("ACP_REPRO_CACHE", raising=False)

    def make(name: str, settings: str = "", yaml: str = YAML_4, run: str = NAME):
        folder = tmp_path / name
        folder.mkdir()
        write_suite(folder, yaml.replace("dtype: float32", f"dtype: float32{settings}"))
        monkeypatch.chdir(folder)
        return load_suite("mini").run(run)

    return make


def edit_suite(old, new):
    path = Path("experiments/mini.yaml")
    path.write_text(path.read_text().replace(old, new))


def outcome(run):
    """The losses, gradient norms and weights of a run."""
    lines = read_json_lines(run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines)))
    losses, norms = ([line[key] for line in lines] for key in ("loss_nats", "grad_norm"))
    return losses, norms, load_file(run.folder / "model/model.safetensors")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The outcome of the run on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("one"))
        patch.delenv("ACP_REPRO_CACHE", raising=False)
        write_suite(folder, YAML_4)
        train_run(run := load_suite("mini").run(NAME))
        return outcome(run)


def assert_same_run(run, one_rank):
    assert is_done(run)
    losses, norms, weights = outcome(run)
    assert losses == pytest.approx(one_rank[0], rel=1e-5)
    assert norms == pytest.approx(one_rank[1], rel=1e-4)
    # AdamW divides by the gradient's magnitude, so rounding of a gradient near 0 can change a weight by a
    # fraction of the learning rate, 1e-2.
    torch.testing.assert_close(weights, one_rank[2], rtol=0, atol=1e-3)


def compile_on_cpu():
    trainer.compiles = lambda *_: True
    trainer.compiled_blocks = functools.partial(compiled_blocks, backend="aot_eager")


@pytest.mark.parametrize(
    ("ranks", "settings", "before"),
    [(2, ", parallel: ddp", None), (2, ", parallel: fsdp, gradient_checkpointing: true", compile_on_cpu)],
)
@pytest.mark.slow
def test_loss_curve_does_not_depend_on_the_number_of_ranks(make_run, one_rank, ranks, settings, before):
    run = make_run("many", settings)
    assert train_on(ranks, Path.cwd(), NAME, before=before) == [(0, "")] * ranks
    assert_same_run(run, one_rank)
    settings = read_json(run.folder / "run.json")
    assert settings["ranks"] == ranks and settings["parallel"] == run.training.parallel
    assert read_json(run.folder / "done.json")["ranks"] == ranks


def test_checkpoint_resumes_with_other_ranks_and_another_mode(make_run, one_rank, tmp_path):
    run = make_run("moving", ", parallel: fsdp")
    assert train_on(4, Path.cwd(), NAME, stop_after=2) == [(0, "")] * 4
    assert len(list((run.folder / "checkpoints/step-00000002").glob("*.safetensors"))) == 4
    edit_suite("parallel: fsdp", "parallel: ddp")
    assert train_on(2, Path.cwd(), NAME, stop_after=4) == [(0, "")] * 2
    train_run(load_suite("mini").run(NAME))
    assert_same_run(run, one_rank)


def nan_on_rank_1():
    # In the last of the two layers, because attention on a CPU rejects NaN gates.
    forward, factors = swiglu.SwiGLU.forward, itertools.cycle([1.0, torch.nan])
    if os.environ["RANK"] == "1":
        swiglu.SwiGLU.forward = lambda self, x: forward(self, x) * next(factors)


def test_nan_on_one_rank_stops_all_ranks(make_run):
    make_run("nan", ", parallel: fsdp")
    ends = train_on(2, Path.cwd(), NAME, before=nan_on_rank_1)
    assert {code for code, _ in ends} == {1}
    for _, message in ends:
        assert message.startswith(f"TrainingError: {NAME}: step 0 gave loss nan")


def test_error_on_rank_zero_is_raised_on_all_ranks(make_run):
    run = make_run("changed")
    train_run(run, stop_after=1)
    edit_suite("1e-2", "2e-2")
    for code, message in train_on(2, Path.cwd(), NAME):
        assert code == 1 and "TrainingError" in message and "0.01, now 0.02" in message


def test_batch_must_divide_evenly_over_the_ranks(make_run, monkeypatch):
    run = make_run("ranks")
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(DistributedError, match="3 ranks .* 4 micro-batches .*NPROC=1 or 2 or 4"):
        check_ranks(run, 4)


def test_small_models_are_replicated_and_large_models_sharded():
    runs = {r.size_name: r for r in load_suite("paper").runs}
    assert runs["760M"].parallel_mode(1) == "none"
    assert {n: r.parallel_mode(2) for n, r in runs.items()} == {"125M": "ddp", "360M": "fsdp", "760M": "fsdp"}


def test_run_resumes_with_context_parallel_ranks(make_run, monkeypatch):
    yaml = YAML.replace("context_length: [128]", "context_length: [256]").replace("1536", "2560")
    yaml = yaml.replace(
        "batch_tokens: 256, micro_batch_tokens: 128", "batch_tokens: 512, micro_batch_tokens: 256"
    )
    name = "pro-tiny-256-acp"
    train_run(whole := make_run("whole", yaml=yaml, run=name))
    one_rank = outcome(whole)
    run = make_run("shared", ", context_parallel: 2, parallel: fsdp", yaml, name)
    assert train_on(4, Path.cwd(), name, stop_after=2) == [(0, "")] * 4
    edit_suite("parallel: fsdp", "parallel: ddp")
    assert train_on(2, Path.cwd(), name, stop_after=4, before=compile_on_cpu) == [(0, "")] * 2
    with pytest.raises(DistributedError, match=r"2 ranks per micro-batch .*; use NPROC=2 or 4"):
        train_run(load_suite("mini").run(name))
    edit_suite("context_parallel: 2", "context_parallel: 1")
    train_run(load_suite("mini").run(name))
    assert_same_run(run, one_rank)
