"""Hugging Face datasets without a network: a local folder read by the library, and a fake of the library."""

import json
import sys
import types

import pytest

from acp_repro.pipeline.data import DataError, prepare
from acp_repro.pipeline.data.labelled import read_labelled

TEXTS = [f"document {i}: " + "some words; " * (i + 3) for i in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ACP_REPRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Records(list):
    """A loaded dataset: labels are numbers, and ``features`` contains their names."""

    features = {"stars": types.SimpleNamespace(names=["bad", "good"])}  # noqa: RUF012


def stand_in(monkeypatch, load):
    """``load(path, config, *, split, streaming)`` as a replacement for ``datasets.load_dataset``."""
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def hf(path="owner/name", **settings):
    return {"corpus": "hf", "path": path, "max_documents": 20, "heldout": 0.3, **settings}


def test_hub_dataset_is_read_through_the_library(tmp_path):
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        texts = [" ", *(f"{split} {text}" for text in TEXTS)]
        lines = [json.dumps({"body": text, "label": i % 2}) for i, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    corpus = prepare(hf(str(folder), text_field="body"))
    splits = corpus.describe()["splits"]
    assert splits["train"]["documents"] + splits["heldout"]["documents"] == 20
    text = corpus.tokenizer.decode([*corpus.tokens("train"), *corpus.tokens("heldout")])
    assert len(text) == sum(map(len, TEXTS[:20])) + 20 * len("train ") and TEXTS[0] in text
    labelled = read_labelled("hf", str(folder), text_field="body", test="test")
    assert labelled.classes == ("0", "1") and len(labelled.splits["test"]) == 40
    assert len(labelled.splits["train"]) + len(labelled.splits["dev"]) == 40 and labelled.splits["dev"]
    with pytest.raises(DataError, match="path: .* has no field 'text'; it has: body, label"):
        read_labelled("hf", str(folder))


def test_streaming_reads_the_budget_once(monkeypatch):
    asked, texts = [], iter(TEXTS)

    def load(*names, **options):
        asked.append((*names, options))
        return ({"text": text} for text in texts)

    stand_in(monkeypatch, load)
    first = prepare(hf(config="en", split="test"))
    again = prepare(hf(config="en", split="test", heldout=0.5))  # the same text
    assert asked == [("owner/name", "en", {"split": "test", "streaming": True})]
    assert len(list(texts)) == 20 and again.folder != first.folder


def test_labels_use_the_names_of_the_dataset(monkeypatch):
    """A Hub dataset stores label numbers and their names; -1 marks a text with a hidden label."""

    def load(path, config, *, split, streaming):
        return Records({"text": f"{split} {i}", "stars": -1 if i == 5 else i % 2} for i in range(6))

    stand_in(monkeypatch, load)
    found = read_labelled("hf", "owner/name", label_field="stars", dev="valid", test="test")
    assert found.classes == ("bad", "good") and found.classes_are == "values of stars"
    assert [(e.text, e.number) for e in found.splits["dev"]] == [(f"valid {i}", i % 2) for i in range(5)]


def test_changed_local_folder_is_reread(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    stand_in(
        monkeypatch,
        lambda path, *_, **__: [{"text": (tmp_path / "set/train.txt").read_text() + c} for c in "abcd"],
    )
    for text in ("one", "two"):
        (tmp_path / "set/train.txt").write_text(text * 9)
        corpus = prepare(hf(str(tmp_path / "set")))
        assert corpus.tokenizer.decode(corpus.tokens("train")).startswith(text)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"cannot be read .*pip install '\.\[hf\]'"),
        (ConnectionError("no\n route"), r"cannot be read \(no route\); .*network"),
        ([{"text": " "}], "path: owner/name, split train, contains no text"),
    ],
)
def test_failure_is_reported_in_one_line_and_leaves_no_entry(cache, monkeypatch, found, message):
    def load(*_, **__):
        if isinstance(found, Exception):
            raise found
        return found

    stand_in(monkeypatch, load)
    if found is None:
        monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=message) as caught:
        prepare(hf())
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
