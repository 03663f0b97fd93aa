"""``python -m acp_repro.needle``: what it prints and keeps, and what it says of bad input."""

import dataclasses
import shutil

import pytest
import torch

from acp_repro.model import ByteTokenizer, FoXConfig, FoXForCausalLM, save_pretrained
from acp_repro.needle import main as command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = FoXConfig.pro(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_heads=2, log_pruning_tolerance=-10
    )
    save_pretrained(FoXForCausalLM(config), folder / "fox")
    save_pretrained(FoXForCausalLM(dataclasses.replace(config, vocab_size=300)), folder / "other")
    save_pretrained(FoXForCausalLM(dataclasses.replace(config, vocab_size=200)), folder / "small")
    save_pretrained(FoXForCausalLM(dataclasses.replace(config, vocab_size=1000)), folder / "large")
    (shutil.copytree(folder / "other", folder / "damaged") / "tokenizer.json").write_text('{"mod')
    (folder / "run.json").write_text('{"project": "of another program"}')
    (folder / "text.txt").write_text("What a fox forgets, a dog remembers. " * 40)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["{}/fox", "--lengths", "100"], "use a length of at least"),
        (
            ["{}/fox", "--lengths", "5000", "--haystack", "{}/text.txt"],
            "a sequence of 5,000 tokens takes 5,000 bytes",
        ),
        (["{}/fox", "--haystack", "{}/no"], "--haystack: "),
        (["{}/fox", "--csv", "{}"], "cannot be written"),
        (["{}/fox", "--depths", "2"], "2 is not a number in [0, 1]"),
        (["{}/other"], "and no tokenizer.json"),
        (["{}/damaged"], "damaged/tokenizer.json: not a file of the library"),
    ],
)
def test_bad_input_is_one_line(checkpoint, capsys, arguments, message):
    try:
        code = command([argument.format(checkpoint) for argument in arguments])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code and message in error and "Traceback" not in error


@pytest.mark.parametrize(("folder", "ids"), [("small", 200), ("large", 1000)])
def test_a_tokeniser_of_another_model_is_refused(checkpoint, capsys, monkeypatch, folder, ids):
    from acp_repro.pipeline.papers.acp.checkpoint_folder import TextCheckpoint

    monkeypatch.setattr(TextCheckpoint, "tokenizer", ByteTokenizer())
    assert command([str(checkpoint / folder)]) == 1
    assert f"the model has {ids} token ids and the tokenizer 257, so it is not" in capsys.readouterr().err
