"""``python -m acp_repro.evaluate`` saves results per settings."""

import pytest

from acp_repro import evaluate

pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")


def test_results_are_printed_and_saved(small_fox, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [str(small_fox), "--tasks", "book_last_word", "--items", "4", "--device", "cpu"]
    assert evaluate.main([*asked, "--context-length", "32"]) == 0
    first = capsys.readouterr().out
    assert "4 requests" in first  # were longer than the context
    (kept,) = (tmp_path / "runs/evaluations").glob("*/*")
    assert evaluate.main([*asked, "--context-length", "32"]) == 0
    again = capsys.readouterr().out
    assert "book_last_word: finished before" in again
    assert [line for line in again.splitlines() if " acc " in line] == [
        line for line in first.splitlines() if " acc " in line
    ]
    # Results of other settings are added and do not replace it.
    assert evaluate.main([*asked, "--context-length", "16", "--exact"]) == 0
    assert "finished before" not in capsys.readouterr().out and kept.is_file()
