"""`prepare` from end to end, and the command."""

import itertools
import json
import logging
import lzma
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from acp_repro.data import main
from acp_repro.pipeline.data import DataConfig, DataError, default_cache, prepare
from acp_repro.pipeline.data import corpus as module

BOOKS = Path(__file__).parents[2] / ".." / "shared" / "data" / "books"
TEXTS = [f"document {i}: " + f"some words of number {i} and {i * i}; " * (i + 3) for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    """Forty documents of different lengths in one file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return folder


def text(folder, **settings):
    return {"corpus": "text", "path": str(folder), "heldout": 0.2, **settings}


def decoded(corpus, split):
    tokens, offsets = corpus.tokens(split), corpus.offsets(split)
    return [corpus.tokenizer.decode(tokens[a:b]) for a, b in itertools.pairwise(offsets)]


def test_default_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ACP_REPRO_CACHE", str(tmp_path / "elsewhere"))
    assert default_cache() == tmp_path / "elsewhere"
    monkeypatch.delenv("ACP_REPRO_CACHE")
    (tmp_path / "project" / "notebooks").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "project" / "notebooks")
    assert default_cache() == tmp_path / "project" / "cache"


# ---- prepare -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 300}])
def test_text_end_to_end(folder, tmp_path, tokenizer, monkeypatch):
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    corpus = prepare(text(folder, tokenizer=tokenizer), tmp_path / "cache")
    train, heldout = decoded(corpus, "train"), decoded(corpus, "heldout")
    assert sorted(train + heldout) == sorted(TEXTS) and heldout
    assert [t for t in TEXTS if t in train] == train  # the order of the file
    assert corpus.tokens("train").dtype == np.uint16
    first = TEXTS.index(heldout[0])
    assert corpus.names("heldout")[0] == f"a.jsonl:{first + 1}"

    facts = corpus.describe(64)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["vocab_size"] == corpus.vocab_size == corpus.bos_id + 1
    split = facts["splits"]["train"]
    assert split["documents"] == len(train)
    assert split["bytes"] == sum(len(t.encode()) for t in train)
    assert split["tokens"] == len(corpus.tokens("train"))
    sequences = corpus.sequences("train", 64, seed=3)
    assert (split["sequences"], split["share_used"]) == (len(sequences), sequences.share_used)
    assert "sequences" not in corpus.describe()["splits"]["train"]

    inputs, labels = sequences.batch(0, 2)
    assert inputs[0, 0] == corpus.bos_id
    d, s = sequences.epoch_order(0)[0]
    ids = corpus.tokens("train")[corpus.offsets("train")[d] :][: 64 * (s + 1)]
    assert labels[0].tolist() == ids[64 * s :].tolist()

    def never(*_):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(module, "_build", never)
    again = prepare(DataConfig(**text(folder, tokenizer=tokenizer)), tmp_path / "cache")
    assert again.describe() == corpus.describe()


def test_two_builds_give_the_same_bytes(folder, tmp_path):
    pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    a, b = (prepare(text(folder, tokenizer={"bpe": 300}), tmp_path / n).folder for n in "ab")
    assert a.name == b.name
    for path in a.iterdir():
        if path.name != "meta.json":  # holds times
            assert path.read_bytes() == (b / path.name).read_bytes()


def test_what_changes_the_key(folder, tmp_path):
    def key(**settings):
        return prepare(text(folder, **settings), tmp_path / "cache").folder.name

    keys = [key(), key(heldout=0.3), key(heldout=0)]
    with open(folder / "a.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    keys.append(key())
    assert len(set(keys)) == 4
    assert key(path=str(folder / "a.jsonl")) == keys[-1]  # the same text by another path


def test_explicit_heldout_files(folder, tmp_path):
    with lzma.open(folder / "held.jsonl.xz", "wt") as file:
        file.write('{"text": "held out"}\n')
    (tmp_path / "other.txt").write_text("another")
    held = [str(folder / "held.jsonl.xz"), str(tmp_path / "other.txt")]
    corpus = prepare(text(folder, heldout=held), tmp_path / "cache")
    assert decoded(corpus, "train") == TEXTS
    assert decoded(corpus, "heldout") == ["held out", "another"]
    one = prepare(text(folder, heldout=held[0]), tmp_path / "cache")
    assert decoded(one, "heldout") == ["held out"]


@pytest.mark.parametrize("name", ["book.txt", "book.jsonl"])
def test_one_document_has_its_tail_held_out(tmp_path, name):
    book = "".join(f"Paragraph {i}, of some words.\nA second line.\n\n" for i in range(400))
    content = json.dumps({"text": book}) if name.endswith("l") else book
    (tmp_path / name).write_text(content)
    corpus = prepare({"corpus": "text", "path": str(tmp_path / name)}, tmp_path / "cache")
    (train,), (heldout,) = decoded(corpus, "train"), decoded(corpus, "heldout")
    assert train + heldout == book and heldout.startswith("Paragraph 38")
    assert 0.04 < len(heldout) / len(book) <= 0.05
    assert "its tail" in corpus.names("heldout")[0]
    assert corpus.sequences("heldout", 64).tokens_used > 800
    whole = prepare({"corpus": "text", "path": str(tmp_path / name), "heldout": 0}, tmp_path / "cache")
    assert decoded(whole, "train") == [book]


def test_two_documents_are_not_cut(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} words " * 50}) + "\n" for i in (5, 8))
    )
    corpus = prepare(text(tmp_path / "a.jsonl", heldout=0.7), tmp_path / "cache")
    assert [len(t) for t in decoded(corpus, "train") + decoded(corpus, "heldout")] == [400, 400]
    with pytest.raises(DataError, match="heldout: 0.01 leaves no held-out document of 2; use a larger share"):
        prepare(text(tmp_path / "a.jsonl", heldout=0.01), tmp_path / "cache")


def test_pictures_in_a_folder_are_skipped_and_counted(folder, tmp_path, caplog):
    before = prepare(text(folder), tmp_path / "cache")
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 9)
    (folder / "more").mkdir()
    (folder / "more" / "b.bin.xz").write_bytes(lzma.compress(bytes(range(1, 256)) * 9))
    with caplog.at_level(logging.WARNING):
        after = prepare(text(folder), tmp_path / "other")
    assert caplog.messages == ["skipped 2 files that are not text: a.png, more/b.bin.xz"]
    assert after.describe() == before.describe()  # the text is the same, and so is its identity


def test_bpe_never_sees_heldout_text(tmp_path):
    pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    (tmp_path / "train.txt").write_text("abc " * 500)
    (tmp_path / "held.txt").write_text("xyz " * 5000)
    config = text(tmp_path / "train.txt", heldout=str(tmp_path / "held.txt"), tokenizer={"bpe": 259})
    corpus = prepare(config, tmp_path / "cache")
    assert len(corpus.tokenizer.encode("xyz ")) == 4
    assert len(corpus.tokenizer.encode("abc ")) < 4


def test_no_heldout_is_possible(folder, tmp_path):
    corpus = prepare(text(folder, heldout=0), tmp_path / "cache")
    assert corpus.tokens("heldout").shape == (0,) and corpus.offsets("heldout").tolist() == [0]
    assert corpus.describe(8)["splits"]["heldout"]["share_used"] == 0
    with pytest.raises(
        DataError, match="heldout: 0 holds out no text to measure on; set a share such as 0.05"
    ):
        corpus.sequences("heldout", 8)
    assert len(corpus.sequences("train", 8))
    with pytest.raises(DataError, match="heldout: 0.0 holds out"):
        DataConfig(heldout=0.0).require_heldout()
    for measurable in (DataConfig(), DataConfig("text", "x", heldout="a"), DataConfig("longcrawl64", "x")):
        measurable.require_heldout()


def test_large_vocabulary_needs_32_bits():
    assert (module._token_dtype(65536), module._token_dtype(65537)) == ("<u2", "<u4")


@pytest.mark.parametrize("cut", [False, True])
def test_corrupt_cache_is_rebuilt(folder, tmp_path, caplog, cut):
    corpus = prepare(text(folder), tmp_path / "cache")
    path = corpus.folder / "train.tokens"
    sound = path.read_bytes()
    path.write_bytes(sound[:-2] if cut else b"\1" + sound[1:])
    with caplog.at_level(logging.WARNING):
        prepare(text(folder), tmp_path / "cache")
    assert "is corrupt" in caplog.text and path.read_bytes() == sound


def test_a_failure_in_the_middle_leaves_no_entry(folder, tmp_path, monkeypatch):
    with open(folder / "a.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl:41: not JSON"):
        prepare(text(folder), tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_prepare_errors(folder, tmp_path):
    def fails(message, cache=tmp_path / "cache", **settings):
        with pytest.raises(DataError, match=message):
            prepare(text(folder, **settings), cache)

    fails("path: .* does not exist", path=str(tmp_path / "nowhere"))
    fails("heldout: .* does not exist", heldout="nowhere")
    fails("heldout: 1e-09 leaves no held-out document of 40; use a larger share", heldout=1e-9)
    fails("heldout: 0.999999 leaves no training document of 40; use a sm", heldout=0.999999)
    fails("every file under .* is held out", heldout=str(folder))
    fails("no field 'body'; set text_field", text_field="body")
    (tmp_path / "file").touch()
    fails("the cache folder .*file cannot be used .*ACP_REPRO_CACHE", cache=tmp_path / "file")
    bpe = {"tokenizer": {"bpe": 512}}  # learnt before anything is counted
    for tokenizer in ({}, bpe):
        fails("holds no text, only blank documents", path=str(tmp_path / "file"), **tokenizer)
    fails("heldout: 0.999999 leaves no training document of 40", heldout=0.999999, **bpe)
    with pytest.raises(DataError, match="split: 'test' is not known; use train or heldout"):
        prepare(text(folder), tmp_path / "cache").tokens("test")
    with pytest.raises(DataError, match="context_length: 0 is no length"):
        prepare(text(folder), tmp_path / "cache").describe(0)
    longest = r"the longest of \d+, 'a\.jsonl:\d+', has \d+; use a context_length of at most"
    with pytest.raises(DataError, match=longest):
        prepare(text(folder), tmp_path / "cache").sequences("train", 10**6)


def test_stdlib_end_to_end(tmp_path):
    corpus = prepare({"corpus": "stdlib"}, tmp_path)
    facts = corpus.describe(1024)
    assert facts["splits"]["train"]["sequences"] > 5000
    assert facts["splits"]["heldout"]["documents"] > 10
    assert {"argparse.py", "typing.py"} <= {*corpus.names("train"), *corpus.names("heldout")}
    inputs, labels = next(iter(corpus.sequences("heldout", 1024).iter_batches(2)))
    assert inputs.shape == (2, 1024) and labels.max() < 256


def test_a_shard_of_books(tmp_path):
    shards = sorted(BOOKS.glob("*.jsonl.xz"))
    if not shards:
        pytest.skip("put books as JSON lines (books_core_*.jsonl.xz) into ../shared/data/books")
    few = tmp_path / "few.jsonl"
    with lzma.open(shards[0]) as file:
        few.write_bytes(b"".join(itertools.islice(file, 6)))
    corpus = prepare(text(few, heldout=0.4), tmp_path / "cache")
    facts = corpus.describe(4096)["splits"]
    assert facts["train"]["documents"] + facts["heldout"]["documents"] == 6
    assert facts["train"]["share_used"] > 0.9
    _, labels = corpus.sequences("train", 4096).batch(0, 1)
    assert " the " in corpus.tokenizer.decode(labels[0])


# ---- the command ---------------------------------------------------------------------------


def test_command(folder, tmp_path, capsys, monkeypatch):
    where = f"--corpus text --path {folder} --cache-dir {tmp_path / 'cache'}".split()
    args = [*where, "--heldout", "0.2", "--context-length", "64"]
    assert main(args) == 0
    out = capsys.readouterr().out
    for word in ("257 ids", "documents", "tokens", "heldout", "sequences of 64"):
        assert word in out
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for more, message in [
        (["--heldout", str(folder / "a.jsonl")], "error: path: every file under"),
        (["--tokenizer", "gpt3"], "error: tokenizer: 'gpt3'"),
        (["--tokenizer", "bpe:300"], "error: not installed: tokenizers"),
    ]:
        assert main([*args, *more])
        assert re.match(message, capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in ("stdlib", "text", "longcrawl64", "hf"))


def test_ctrl_c_is_one_line(folder, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("acp_repro.pipeline.data.corpus._build", stop)
    assert main(f"--corpus text --path {folder} --cache-dir {tmp_path / 'cache'}".split()) == 130
    said = capsys.readouterr().err.strip()
    assert said.startswith("stopped; ") and "\n" not in said
    assert not [path for path in tmp_path.rglob("*") if ".partial" in path.name or ".tmp" in path.name]


def test_command_exports_the_tokenizer_of_a_suite(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    data = f"data: {{corpus: text, path: {folder}, heldout: 0.2, tokenizer: {{bpe: 300}}}}\n"
    (tmp_path / "experiments" / "mine.yaml").write_text(data)
    file = tmp_path / "kept" / "tokenizer.json"
    where = ["--suite", "mine", "--cache-dir", str(tmp_path / "cache")]
    assert main(["export-tokenizer", str(file), *where]) == 0
    assert "300 ids" in capsys.readouterr().out
    made = prepare(text(folder, tokenizer={"bpe": 300}), tmp_path / "cache")
    again = prepare(text(folder, tokenizer={"file": str(file)}), tmp_path / "cache")
    assert again.folder != made.folder
    for split in ("train", "heldout"):  # not a bit differs, and neither does BOS
        assert again.tokens(split).tobytes() == made.tokens(split).tobytes()
    assert (again.bos_id, again.vocab_size) == (made.bos_id, made.vocab_size) == (299, 300)
    file.unlink()  # the entry is complete without it, once it is open
    assert again.save_tokenizer(tmp_path).read_bytes() == made.save_tokenizer(tmp_path).read_bytes()
    assert prepare(text(folder), tmp_path / "cache").save_tokenizer(tmp_path) is None  # bytes

    for args, message in [
        (["export-tokenizer", "x", "--suite", "none"], "experiments/none.yaml: "),
        (
            ["export-tokenizer", "x", *where[2:], "--corpus", "text", "--path", str(folder)],
            "no tokenizer.json to export",
        ),
        ([*where, "--corpus", "text"], "--suite sets the data; leave out --corpus"),
        ([*where, "--workers", "0"], "workers: 0 must be at least 1"),
        ([*where[2:], "--tokenizer", f"file:{file}"], "cannot be read .*export-tokenizer"),
    ]:
        if "--workers" in args:
            args = [*args[:3], str(tmp_path / "empty"), *args[4:]]
        assert main(args) == 1
        assert re.search(message, capsys.readouterr().err)
