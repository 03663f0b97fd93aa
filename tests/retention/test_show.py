"""``python -m acp_repro.retention.show``: what each gate lets through of a text."""

import shutil
from pathlib import Path

import pytest

from acp_repro.retention import show
from acp_repro.retention.show import visible
from tests.conftest import SHIPPED as FOX

from .models import build

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "pretrained/ar-tiny-stdlib"
TEXT = "    def connection_lost(self, exc):\n        self._loop.call_soon(self._transport.close)\n" * 2


def test_dropped_characters_are_dots():
    offsets = [(0, 0), (0, 3), (4, 7), (8, 11), (0, 0)]
    assert visible("one two\nsix", offsets, [True, True, False, True, False]) == "one····\nsix"
    for kept in ([True, False, True], [False, True, True], [True, True, False]):
        assert visible("日", [(0, 1)] * 3, kept) == "·"  # three tokens of a character


def test_the_model_of_the_project(capsys):
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 4_000_000
    for budget in (30, 10):
        assert show.main([str(SHIPPED), "--text", TEXT, "--budget", str(budget / 100)]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        tokens = int(first.split()[0])
        assert f"at the input: {budget * tokens // 100} of {tokens} tokens go on" in lines
        shown = "\n".join(lines[2:-2])
        assert len(shown) == len(TEXT) - 1 and all(a in (b, "·") for a, b in zip(shown, TEXT, strict=False))
    assert lines[-1].startswith("answer: asyncio (") and "of 6 packages of the Python standard" in lines[-1]


def test_errors_are_one_line(tmp_path, capsys):
    cut = shutil.copytree(SHIPPED, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(b"cut short")
    build().save_pretrained(tmp_path / "dense")
    for arguments, words in (
        (["nowhere", "--text", "x"], "nowhere: no config.json of a model"),
        ([str(SHIPPED), "--text", "  "], "the text is empty; give some"),
        ([str(SHIPPED), "--file", str(SHIPPED / "model.safetensors")], "safetensors: cannot be read"),
        ([str(SHIPPED), "--text", "x", "--budget", "0"], "budget: must be a number in (0, 1]"),
        ([str(FOX), "--text", "x"], "fox without gates; give a run"),
        ([str(cut), "--text", "x"], "model and tokenizer cannot be read"),
        ([str(tmp_path / "dense"), "--text", "x"], "a checkpoint of distilbert without gates"),
    ):
        assert show.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        show.main(["nowhere", "--text", "x", "--budget", "nan"])
