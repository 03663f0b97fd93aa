"""``python -m acp_repro.evaluate``: one line for what cannot be, results that are kept."""

import json
import shutil
from pathlib import Path

import pytest

from acp_repro import evaluate

pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")


def test_what_cannot_be_is_one_line(small_fox, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_fox, "other")
    theirs = json.loads(Path("other/tokenizer.json").read_text())
    merges = theirs["model"]["merges"]
    gone = {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "") for merge in merges[2000:]}
    theirs["model"]["merges"] = merges[:2000]
    theirs["model"]["vocab"] = {k: v for k, v in theirs["model"]["vocab"].items() if k not in gone}
    Path("other/tokenizer.json").write_text(json.dumps(theirs))
    for path, options, message in (
        (small_fox, ["--tasks", "piqqa", "--data-dir", "."], "there is no task 'piqqa'; did you mean piqa?"),
        (small_fox, ["--tasks", "piqa", "--data-dir", "."], "no lm_eval/piqa.jsonl here, so piqa cannot be"),
        ("other", ["--tasks", "book_last_word"], "the model has 4096 token ids and the tokenizer 2257"),
    ):
        assert evaluate.main([str(path), *options, "--device", "cpu"])
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_results_are_printed_and_kept(small_fox, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [str(small_fox), "--tasks", "book_last_word", "--items", "4", "--device", "cpu"]
    assert evaluate.main([*asked, "--context-length", "32"]) == 0
    first = capsys.readouterr().out
    assert "book_last_word  acc" in first and "shipped book" in first
    assert "4 requests were longer than the context and lost their beginning" in first
    (kept,) = (tmp_path / "runs/evaluations").glob("*/*")
    assert evaluate.main([*asked, "--context-length", "32"]) == 0
    again = capsys.readouterr().out
    assert "book_last_word: finished before" in again
    assert [line for line in again.splitlines() if " acc " in line] == [
        line for line in first.splitlines() if " acc " in line
    ]
    # Other settings are kept beside it, not instead of it.
    assert evaluate.main([*asked, "--context-length", "16", "--exact"]) == 0
    assert "finished before" not in capsys.readouterr().out and kept.is_file()
    assert evaluate.main([*asked, "--context-length", "32", "--again"]) == 0
    assert "finished before" not in capsys.readouterr().out
