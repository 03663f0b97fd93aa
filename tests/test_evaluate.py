"""``python -m acp_repro.evaluate``: one line for what cannot be, results that are kept."""

import shutil
from pathlib import Path

import pytest

from acp_repro import evaluate

PRETRAINED = Path(__file__).parent.parent / "pretrained" / "pro-3m-4k-acp"


@pytest.fixture
def harness():
    return pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")


def test_without_the_harness_one_line_says_how_to_get_it(monkeypatch, capsys):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
        return real(name, *args, **kwargs)

    for name in ("evaluation", "tasks"):
        monkeypatch.delitem(
            __import__("sys").modules, f"acp_repro.pipeline.papers.acp.evaluation.{name}", raising=False
        )
    monkeypatch.setattr(builtins, "__import__", without)
    assert evaluate.main([str(PRETRAINED), "--tasks", "piqa"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "[eval]" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "piqqa", "--data-dir", "."], "there is no task 'piqqa'; did you mean piqa?"),
        (["--tasks", "piqa", "--data-dir", "."], "no lm_eval/piqa.jsonl here, so piqa cannot be evaluated"),
        (["--tasks", "piqa", "--data-dir", "nowhere"], "nowhere: no lm_eval/piqa.jsonl here"),
        (
            ["--tasks", "copa, piqqa, copaa", "--data-dir", "."],
            "there is no task 'piqqa'; did you mean piqa? there is no task 'copaa'; did you mean copa?",
        ),
        (["--output", __file__], "is a file; give a folder"),
        (["--tokenizer", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(harness, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert evaluate.main([str(PRETRAINED), *arguments, "--device", "cpu"])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_tokeniser_of_another_model_is_refused(harness, tmp_path, monkeypatch, capsys):
    import json

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(PRETRAINED, folder)
    theirs = json.loads((folder / "tokenizer.json").read_text())
    merges = theirs["model"]["merges"]
    gone = {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "") for merge in merges[2000:]}
    theirs["model"]["merges"] = merges[:2000]
    theirs["model"]["vocab"] = {k: v for k, v in theirs["model"]["vocab"].items() if k not in gone}
    (folder / "tokenizer.json").write_text(json.dumps(theirs))
    assert evaluate.main([str(folder), "--tasks", "book_last_word", "--device", "cpu"]) == 1
    assert (
        "model has 4096 token ids and the tokenizer 2257, so it is not the model's" in capsys.readouterr().err
    )


def test_results_are_printed_and_kept(harness, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [str(PRETRAINED), "--tasks", "book_last_word", "--items", "4", "--device", "cpu"]
    assert evaluate.main([*asked, "--context-length", "32"]) == 0
    first = capsys.readouterr().out
    assert "book_last_word  acc" in first and "shipped book" in first
    assert "4 requests were longer than the context and lost their beginning" in first
    (kept,) = (tmp_path / "runs/evaluations/pretrained-pro-3m-4k-acp").iterdir()
    assert kept.name.startswith("book_last_word-")
    assert evaluate.main([*asked, "--context-length", "32"]) == 0
    again = capsys.readouterr().out
    assert "book_last_word: finished before" in again
    assert [line for line in again.splitlines() if " acc " in line] == [
        line for line in first.splitlines() if " acc " in line
    ]
    # Other settings are kept beside it, not instead of it.
    assert evaluate.main([*asked, "--context-length", "16", "--exact"]) == 0
    assert "finished before" not in capsys.readouterr().out and kept.is_file()
    assert evaluate.main([*asked, "--context-length", "32"]) == 0
    assert "finished before" in capsys.readouterr().out
    assert evaluate.main([*asked, "--context-length", "32", "--again"]) == 0
    assert "finished before" not in capsys.readouterr().out


def test_what_context_is_taken_is_said():
    notes: list[str] = []
    assert evaluate._context_length(None, None, notes) == 4096 and "does not name its" in notes[0]
    assert evaluate._context_length(512, None, notes) == 512 and len(notes) == 1
    assert evaluate._context_length(512, 1024, notes) == 1024
    assert notes[1] == "a context of 1024 tokens is longer than the 512 that the model was trained with"
