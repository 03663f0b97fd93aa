"""A trained run is exported to pretrained/ and measured from there without training."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from acp_repro import train as train_command
from acp_repro.measure import main as measure
from acp_repro.model import load_pretrained
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.run_folder import is_done
from analysis import drawing
from scripts import publish
from tests.suites import YAML, write_suite

RUN = "pro-tiny-128-acp"
BPE = YAML.replace("{corpus: text,", "{tokenizer: {bpe: 280}, corpus: text,")
READY = (
    YAML.replace("{corpus: text,", f"{{tokenizer: {{file: pretrained/{RUN}/tokenizer.json}}, corpus: text,")
    .replace("grid:", "weights: {folder: pretrained, trained_by: mini}\ngrid:")
    .replace("[-10, null]", "[-10]")
)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A working folder with a run of suite `mini` in pretrained/, with its run folder deleted."""
    pytest.importorskip("tokenizers", reason="byte-pair tokenisers: pip install -e '.[bpe]'")
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("ACP_REPRO_CACHE", raising=False)
        write_suite(folder, BPE)
        write_suite(folder, READY, "ready")
        assert train_command.main(["--suite", "mini", "--run", RUN]) == 0
        assert measure(["loss", "pruned_ratio", "--suite", "mini", "--run", RUN]) == 0
        assert publish.main(["--suite", "mini", "--run", RUN]) == 0
        trained = load_pretrained(Path("runs/mini") / RUN / "model")
        shutil.rmtree("runs")
        yield trained


def test_folder_contains_the_model_and_the_command_of_its_training(published, capsys):
    run = load_suite("ready").run(RUN)
    assert {t.dtype for t in load_file(run.folder / "model.safetensors").values()} == {torch.bfloat16}
    model = load_pretrained(run.model_folder)
    for ours, theirs in zip(model.parameters(), published.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16().float())
    command = "python -m acp_repro.train --suite mini --run pro-tiny-128-acp"
    assert command in (run.folder / "README.md").read_text()
    assert train_command.main(["--suite", "ready"]) == 2
    assert command in capsys.readouterr().err and not Path("runs").exists()


def test_pretrained_model_is_measured_and_plotted_without_training(published):
    assert measure(["pruned_ratio", "loss", "--suite", "ready"]) == 0
    drawing.draw("ready", "figure4")
    assert Path("figures/ready/figure4.png").is_file() and not Path("runs").exists()


def test_other_weights_are_not_accepted_as_the_pretrained_model(published, capsys):
    run = load_suite("ready").run(RUN)
    path = run.model_folder / "model.safetensors"
    before = path.read_bytes()
    assert is_done(run)
    weights = load_file(path)
    weights["model.norm.weight"] += 1
    save_file(weights, path)
    assert not is_done(run)
    assert measure(["loss", "--suite", "ready", "--run", RUN, "--force"]) == 1
    assert "contains no finished weights" in capsys.readouterr().err
    path.write_bytes(before)
    assert is_done(run)
