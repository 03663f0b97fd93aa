"""`prepare` from end to end, and the data command."""

import itertools
import json
import shutil

import numpy as np
import pytest

from acp_repro.data import main
from acp_repro.model import ByteTokenizer
from acp_repro.pipeline.data import DataConfig, DataError, default_cache, prepare
from acp_repro.pipeline.data import corpus as module
from acp_repro.pipeline.data.corpus import tokenise
from acp_repro.pipeline.data.sources import Document

TEXTS = [f"document {i}: " + f"some words of number {i} and {i * i}; " * (i + 3) for i in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ACP_REPRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    """Forty documents of different lengths in one file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t, "blank": " "}) + "\n" for t in TEXTS))
    return folder


def text(folder, **settings):
    return {"corpus": "text", "path": str(folder), "heldout": 0.2, **settings}


def decoded(corpus, split):
    tokens, offsets = corpus.tokens(split), corpus.offsets(split)
    return [corpus.tokenizer.decode(tokens[a:b]) for a, b in itertools.pairwise(offsets)]


def test_default_cache(monkeypatch, tmp_path, cache):
    assert default_cache() == cache
    monkeypatch.delenv("ACP_REPRO_CACHE")
    (tmp_path / "project" / "notebooks").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "project" / "notebooks")
    assert default_cache() == tmp_path / "project" / "cache"


@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 300}])
def test_text_corpus_end_to_end(folder, tokenizer, monkeypatch):
    corpus = prepare(text(folder, tokenizer=tokenizer))
    train, heldout = decoded(corpus, "train"), decoded(corpus, "heldout")
    assert sorted(train + heldout) == sorted(TEXTS) and heldout
    assert [t for t in TEXTS if t in train] == train  # the order of the file
    tokens = corpus.tokens("train")
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 and not tokens.flags.writeable

    split = corpus.describe(64)["splits"]["train"]
    counted = (split["documents"], split["bytes"], split["tokens"])
    assert counted == (len(train), sum(len(t.encode()) for t in train), len(tokens))
    sequences = corpus.sequences("train", 64, seed=3)
    assert split["sequences"] == len(sequences)
    assert sequences.batch(0, 2)[0][:, 0].tolist() == [corpus.bos_id] * 2

    with monkeypatch.context() as patch:
        patch.setattr(module, "_build", lambda *_: pytest.fail("tokenised again"))
        again = prepare(DataConfig(**text(folder, tokenizer=tokenizer)))
    assert again.describe() == corpus.describe()
    before = {path.name: path.read_bytes() for path in corpus.folder.iterdir()}
    shutil.rmtree(corpus.folder)
    prepare(text(folder, tokenizer=tokenizer))
    assert {path.name: path.read_bytes() for path in corpus.folder.iterdir()} == before


def test_cache_key_depends_on_text_and_settings(folder):
    def key(**settings):
        return prepare(text(folder, **settings)).folder.name

    keys = [key(), key(heldout=0.3), key(heldout=0)]
    with open(folder / "a.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    keys.append(key())
    assert len(set(keys)) == 4
    assert key(path=str(folder / "a.jsonl")) == keys[-1]  # the same text by another path


def test_heldout_paths_match_the_heldout_documents(tmp_path):
    paths = [str(tmp_path / name) for name in ("books", "a.txt", "last.txt")]
    (tmp_path / "books").mkdir()
    for name, words in {"books/b.txt": "of a folder", "a.txt": "of a file", "last.txt": "held out"}.items():
        (tmp_path / name).write_text(words)
    corpus = prepare(text(tmp_path, path=paths, heldout=paths[2:]))
    assert decoded(corpus, "train") == ["of a folder", "of a file"]
    assert decoded(corpus, "heldout") == ["held out"]
    with pytest.raises(DataError, match="every file under .* is held out"):
        prepare(text(tmp_path, path=paths[2], heldout=paths[2]))


def test_end_of_a_single_document_is_held_out(tmp_path):
    book = "".join(f"Paragraph {i} of a book, é.\n\n" for i in range(200))
    (tmp_path / "book.txt").write_text(book)
    corpus = prepare(text(tmp_path / "book.txt", heldout=0.1))
    (train,), (heldout,) = decoded(corpus, "train"), decoded(corpus, "heldout")
    assert train + heldout == book and heldout.startswith("Paragraph ")
    assert 0.05 * len(book) < len(heldout) <= 0.1 * len(book)


def test_bpe_is_trained_without_heldout_text(tmp_path):
    (tmp_path / "train.txt").write_text("abc " * 500)
    (tmp_path / "held.txt").write_text("xyz " * 5000)
    config = text(tmp_path / "train.txt", heldout=str(tmp_path / "held.txt"), tokenizer={"bpe": 259})
    corpus = prepare(config)
    assert len(corpus.tokenizer.encode("xyz ")) == 4
    assert len(corpus.tokenizer.encode("abc ")) < 4


def test_saved_tokenizer_returns_the_same_tokens(folder, tmp_path):
    made = prepare(text(folder, tokenizer={"bpe": 300}))
    file = made.save_tokenizer(tmp_path / "kept")
    assert file.read_bytes() == (made.folder / file.name).read_bytes()
    again = prepare(text(folder, tokenizer={"file": str(file)}))
    assert again.folder != made.folder
    for split in ("train", "heldout"):  # bitwise identical, BOS included
        assert again.tokens(split).tobytes() == made.tokens(split).tobytes()
    assert (again.bos_id, again.vocab_size) == (made.bos_id, made.vocab_size) == (299, 300)
    assert prepare(text(folder)).save_tokenizer(tmp_path) is None  # bytes


def test_corpus_without_heldout_text(folder):
    corpus = prepare(text(folder, heldout=0))
    assert corpus.tokens("heldout").shape == (0,) and corpus.offsets("heldout").tolist() == [0]
    assert corpus.describe(8)["splits"]["heldout"]["share_used"] == 0
    with pytest.raises(DataError, match="heldout: 0 holds out no text to measure on"):
        corpus.sequences("heldout", 8)
    assert len(corpus.sequences("train", 8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere"}, "path: .* does not exist"),
        ({"heldout": "nowhere"}, "heldout: .* does not exist"),
        ({"text_field": "blank"}, "path: .* contains no text; it is empty or blank"),
        ({"heldout": 1e-9}, "heldout: 1e-09 leaves 40 documents for training and holds out 0"),
        ({"heldout": 0.999999}, "leaves 0 documents for training and holds out 40"),
        ({"text_field": "body"}, r"a.jsonl:1: no field 'body'; this record has: text, blank"),
    ],
)
def test_unusable_text_is_reported_in_one_line_and_leaves_no_entry(folder, cache, settings, message):
    with pytest.raises(DataError, match=message):
        prepare(text(folder, **settings))
    assert {path.suffix for path in cache.glob("*")} <= {".lock"}


def test_thread_count_does_not_change_tokens_and_reading_is_lazy(monkeypatch):
    monkeypatch.setattr(module, "_GROUP_BYTES", 3000)
    documents = [("train", Document(str(i), b"\x61" * (37 * i % 1009), b"")) for i in range(600)]
    alone, together = (list(tokenise(documents, ByteTokenizer(), workers)) for workers in (1, 3))
    for (split, document, ids), other, given in zip(alone, together, documents, strict=True):
        assert (split, document) == other[:2] == given and bytes(ids) == bytes(other[2]) == document.data
    read = []
    running = tokenise((read.append(one) or one for one in documents), ByteTokenizer(), 2)
    next(running)
    assert len(read) < 100
    running.close()


def test_command(folder, tmp_path, capsys, cache):
    settings = f"{{corpus: text, path: {folder}, heldout: 0.2, tokenizer: TOKENIZER}}"
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        f"description: a test\ndata: {settings.replace('TOKENIZER', 'bytes')}\n"
        "sizes: {tiny: {num_hidden_layers: 1, hidden_size: 16, head_dim: 16, tokens: 4096, "
        "learning_rate: 1e-2}}\n"
        "grid: [{size: [tiny], context_length: [128], log_pruning_tolerance: [-10]}]\n"
        "training: {batch_tokens: 256, micro_batch_tokens: 128, warmup_tokens: 512}\n"
    )
    for source in ([settings.replace("TOKENIZER", "bytes")], ["--suite", str(suite)]):
        assert main([*source, "--context-lengths", "64"]) == 0
        assert str(cache) in capsys.readouterr().out
