"""The command that shows what a model keeps of a text."""

from pathlib import Path

import pytest
import torch

from acp_repro.lap.compress import LEGEND, TERMINAL_LEGEND, group_by_gate, main, mark_tokens
from tests.conftest import SHIPPED
from tests.lap.tiny import TEXTS, model


@pytest.fixture
def folder(tmp_path):
    model().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_every_token_is_shown_once():
    built = model()
    texts = [*TEXTS, "日本 🎉 café"]  # their tokens are bytes, and a mark may not stand between two
    memory = built.encode(texts)
    for row, text in enumerate(texts):
        plain = mark_tokens(built, memory, row, colour=False)
        for gate in range(1, memory.gates + 1):
            plain = plain.replace(f"]{gate}", "")
        assert plain.replace("[", "") == text
        groups = group_by_gate(built, memory, row)
        assert [name for name, _ in groups] == ["gate 1 drops", "gate 2 drops", "kept"]
        assert sum(len(tokens) for _, tokens in groups) == int(memory.lengths[row])
        assert groups[-1][1] == memory.tokens[row]


def test_a_character_of_several_tokens_is_marked_by_its_first_gate():
    built = model()
    memory = built.encode(["日"])
    assert memory.lengths.tolist() == [4]  # three bytes and EOS
    memory.dropped_by[:] = torch.tensor([[-1, 1, 0, -1]])
    assert mark_tokens(built, memory, 0, colour=False) == "[日]1"
    memory.dropped_by[:] = torch.tensor([[-1, -1, -1, -1]])
    assert mark_tokens(built, memory, 0, colour=False) == "日"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_folder_and_a_file(folder, tmp_path, capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    (tmp_path / "texts.txt").write_bytes("a cat\u2028sat\r\n\na mat\x0c\r\n".encode())
    assert main([str(tmp_path), "--file", str(tmp_path / "texts.txt")]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == (TERMINAL_LEGEND if terminal else LEGEND) and rest.count("written") == 2


def test_what_cannot_be_is_one_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    (tmp_path / "long.txt").write_text(f"a cat\n\n\n{'a ' * 80}\n")
    (tmp_path / "latin.txt").write_bytes("a cat\ncafé\n".encode("latin-1"))
    model().save_pretrained(tmp_path / "mute")
    (tmp_path / "mute/tokenizer.json").unlink()
    for arguments, words in (
        (["nowhere", "--text", "a"], "holds no config.json"),
        ([str(tmp_path / "mute"), "--text", "a"], "mute: holds no tokenizer.json; copy it there"),
        ([str(SHIPPED), "--text", "a"], "a checkpoint of forgetting_transformer-project_fox"),
        ([folder, "--file", str(tmp_path / "long.txt")], "long.txt:4 has "),
        # A file is read before the model, which takes seconds to load.
        (["nowhere", "--file", str(tmp_path / "latin.txt")], "latin.txt: cannot be read"),
        ([folder, "--text", "a", "--device", "tpu"], "--device tpu"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
