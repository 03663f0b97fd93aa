"""The command that shows what a model keeps of a text."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install -e '.[lap]'")

from acp_repro.lap.show import by_gate, legend, marked

from acp_repro.lap.compress import main
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
        plain = marked(built, memory, row, colour=False)
        for gate in range(1, memory.gates + 1):
            plain = plain.replace(f"]{gate}", "")
        assert plain.replace("[", "") == text
        groups = by_gate(built, memory, row)
        assert [name for name, _ in groups] == ["gate 1 drops", "gate 2 drops", "kept"]
        assert sum(len(tokens) for _, tokens in groups) == int(memory.lengths[row])
        assert groups[-1][1] == memory.tokens[row]


def test_the_command(folder, capsys):
    assert main([folder, "--text", TEXTS[0], "--text", TEXTS[1]]) == 0
    output = capsys.readouterr().out
    assert output.count("gate 1 drops") == 2 and output.count("written") == 2 and "of 12 tokens" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_the_marks_are_explained_once(folder, capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert main([folder, "--text", TEXTS[0], "--text", TEXTS[1]]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == legend(terminal) and legend(terminal) not in rest
    words = ("bold", "grey") if terminal else ("[word]2", "gate 2")
    assert all(word in first for word in (*words, "kept", "dropped"))


def test_run_folders_and_files(folder, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text(f"{TEXTS[0]}\n\n{TEXTS[1]}\n")
    assert main([str(tmp_path), "--file", str(tmp_path / "texts.txt")]) == 0
    assert capsys.readouterr().out.count("written") == 2
    (tmp_path / "texts.txt").write_bytes("a cat\u2028sat\r\na mat\x0c\r\n".encode())
    assert main([str(tmp_path), "--file", str(tmp_path / "texts.txt")]) == 0
    assert capsys.readouterr().out.count("written") == 2


def test_what_cannot_be_is_one_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    (tmp_path / "long.txt").write_text(f"a cat\n\n\n{'a ' * 80}\n")
    (tmp_path / "latin.txt").write_bytes("a cat\ncafé\n".encode("latin-1"))
    (tmp_path / "blank.txt").write_text(" \n")
    model().save_pretrained(tmp_path / "mute")
    (tmp_path / "mute/tokenizer.json").unlink()
    for arguments, words in (
        (["nowhere", "--text", "a"], "holds no config.json"),
        ([str(tmp_path / "mute"), "--text", "a"], "mute: holds no tokenizer.json; copy it there"),
        ([folder, "--text", ""], "text 1 of 1 is empty"),
        ([folder, "--text", "a " * 80], "the model's maximum is 64"),
        ([folder, "--text", "a \udcff"], "text 1 of 1 has no character at place 3"),
        (["pretrained/pro-3m-4k-acp", "--text", "a"], "a checkpoint of forgetting_transformer-project_fox"),
        ([folder, "--file", str(tmp_path / "long.txt")], "long.txt:4 has "),
        # A file is read before the model, which takes seconds to load.
        (["nowhere", "--file", str(tmp_path / "none.txt")], "none.txt: cannot be read (No such file or"),
        (["nowhere", "--file", str(tmp_path)], f"{tmp_path}: cannot be read (Is a directory); give a file"),
        (
            ["nowhere", "--file", str(tmp_path / "blank.txt")],
            "blank.txt: holds no text; give one text a line",
        ),
        (
            ["nowhere", "--file", str(tmp_path / "latin.txt")],
            "latin.txt:2: byte 0xe9 is not UTF-8; convert it to UTF-8",
        ),
        ([folder, "--text", "a", "--device", "tpu"], "--device tpu"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
