"""``python -m acp_repro.retention.show``: what each gate lets through of a text."""

import shutil
from pathlib import Path

import pytest

from acp_repro.retention import RetentionConfig, retain, show
from acp_repro.retention.show import visible

from .models import build

PRO = Path(__file__).parents[2] / "pretrained/pro-3m-4k-acp"  # no encoder


def test_dropped_characters_are_dots():
    offsets = [(0, 0), (0, 3), (4, 7), (8, 11), (0, 0)]
    assert visible("one two\nsix", offsets, [True, True, False, True, False]) == "one····\nsix"
    assert visible("one two", [(0, 0)], [True]) == "·······"
    for kept in (
        [True, False, True],
        [False, True, True],
        [True, True, False],
    ):  # three tokens of a character
        assert visible("日", [(0, 1)] * 3, kept) == "·"


@pytest.fixture
def folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[retention]'")
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "one", "two", "three", "four", "five", "six"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(tmp_path)
    retain(build(), RetentionConfig(0.5, gates=(0, 2), schedule="geometric")).save_pretrained(tmp_path)
    (tmp_path / "classes.json").write_text('["red", "green", "blue"]')
    return tmp_path


def test_the_text_once_a_gate(folder, capsys):
    text = "one two three four five six"
    assert show.main([str(folder), "--text", text]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 tokens, adaptive, budget 50%"
    assert "at the input: 4 of 8 tokens go on" in lines and "after block 2: 2 of 8 tokens go on" in lines
    shown = [line for line in lines if "·" in line]
    assert len(shown) == 2 and all(len(line) == len(text) for line in shown)
    for line in shown:
        assert all(a in (b, "·") for a, b in zip(line, text, strict=True))
    assert all(b == "·" or a == b for a, b in zip(shown[0], shown[1], strict=True))  # none comes back
    assert lines[-1].startswith("answer: ") and lines[-1].endswith("%), of 3 classes: red, green, blue")
    assert show.main([str(folder), "--text", text, "--budget", "0.75"]) == 0
    assert "at the input: 6 of 8 tokens go on" in capsys.readouterr().out
    assert show.main([str(folder), "--text", "one two", "--question", "six?"]) == 0


def test_errors_are_one_line(folder, tmp_path, capsys):
    cut = shutil.copytree(folder, tmp_path / "cut")
    (folder / "weights.bin").write_bytes((cut / "model.safetensors").read_bytes())
    (cut / "model.safetensors").write_bytes(b"cut short")
    for arguments, words in (
        (["nowhere", "--text", "x"], "nowhere: no config.json there"),
        ([str(folder), "--text", "  "], "the text is empty; give some"),
        ([str(folder), "--file", "none.txt"], "--file none.txt: cannot be read (No such file"),
        ([str(folder), "--file", str(folder)], "cannot be read (Is a directory); give a file of text"),
        ([str(folder), "--file", str(folder / "weights.bin")], "weights.bin: is not text in UTF-8"),
        ([str(PRO), "--text", "x"], "of forgetting_transformer-project_fox without gates; give a run"),
        ([str(cut), "--text", "x"], "its weights cannot be read"),
    ):
        assert show.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
    build().save_pretrained(tmp_path / "dense")
    assert show.main([str(tmp_path / "dense"), "--text", "x"]) == 2
    assert "a checkpoint of distilbert without gates" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["0", "2", "nan"])
def test_an_impossible_budget_is_refused_before_anything_is_read(budget, capsys):
    with pytest.raises(SystemExit) as raised:
        show.main(["nowhere", "--text", "x", "--budget", budget])
    assert raised.value.code == 2 and "error: argument --budget: " in capsys.readouterr().err


def test_the_model_of_the_project(capsys):
    folder = Path(__file__).parents[2] / "pretrained/ar-tiny-stdlib"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
    text = "    def connection_lost(self, exc):\n        self._loop.call_soon(self._transport.close)\n" * 2
    assert show.main([str(folder), "--text", text]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    tokens = int(first.split()[0])
    assert first.endswith("adaptive, budget 30%")
    assert f"at the input: {3 * tokens // 10} of {tokens} tokens go on" in lines
    assert lines[-1].startswith("answer: asyncio (")
    packages = "asyncio, distutils, email, idlelib, tkinter, xml"
    assert lines[-1].endswith(f"%), of 6 packages of the Python standard library: {packages}")
