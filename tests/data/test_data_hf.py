"""Hugging Face datasets without a network: a local folder through the library, and a stand-in for it."""

import json
import sys
import types
from typing import ClassVar

import pytest

from acp_repro.pipeline.data import DataError, prepare
from acp_repro.pipeline.data.labelled import read_labelled

TEXTS = [f"document {i}: " + "some words; " * (i + 3) for i in range(40)]


def standin(records=None, error=None):
    """A module in the place of `datasets`, to see what is asked of it and to let it fail."""
    module = types.ModuleType("datasets")
    module.asked, module.given = [], 0

    def load_dataset(*names, **options):
        module.asked.append((*names, options))
        if error is not None:
            raise error

        def stream():
            for record in records:
                module.given += 1
                yield record

        return stream()

    module.load_dataset = load_dataset
    return module


def hf(path="owner/name", **settings):
    return {"corpus": "hf", "path": path, "max_documents": 20, "heldout": 0.3, **settings}


def test_a_dataset_of_the_library(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    monkeypatch.setenv("ACP_REPRO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        lines = [
            json.dumps({"body": text, "label": i % 2})
            for i, text in enumerate([" ", *(f"{split} {t}" for t in TEXTS)])
        ]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines))
    corpus = prepare(hf(str(tmp_path / "data"), text_field="body"))
    splits = corpus.describe()["splits"]
    assert splits["train"]["documents"] + splits["heldout"]["documents"] == 20
    assert splits["heldout"]["documents"]
    text = corpus.tokenizer.decode([*corpus.tokens("train"), *corpus.tokens("heldout")])
    assert len(text) == sum(map(len, TEXTS[:20])) + 20 * len("train ") and TEXTS[0] in text
    labelled = read_labelled("hf", str(tmp_path / "data"), text_field="body", test="test")
    assert labelled.classes == ("0", "1") and len(labelled.splits["test"]) == 40
    assert len(labelled.splits["train"]) + len(labelled.splits["dev"]) == 40 and labelled.splits["dev"]
    with pytest.raises(DataError, match="path: .* has no field 'text'; it has: body, label"):
        read_labelled("hf", str(tmp_path / "data"))


def test_only_the_budget_is_streamed_and_only_once(tmp_path, monkeypatch):
    library = standin({"text": text} for text in TEXTS)
    monkeypatch.setitem(sys.modules, "datasets", library)
    first = prepare(hf(config="en", split="test"), tmp_path)
    assert library.asked == [("owner/name", "en", {"split": "test", "streaming": True})]
    assert library.given == 20
    again = prepare(hf(config="en", split="test", heldout=0.5), tmp_path)  # the same text
    assert len(library.asked) == 1 and again.folder != first.folder


def test_labels_have_the_names_of_their_set(tmp_path, monkeypatch):
    """A set of the Hub keeps numbers and says their names; -1 is of a text whose label it keeps to itself."""

    class Loaded(list):
        features: ClassVar = {"stars": types.SimpleNamespace(names=["bad", "good"])}

    library = standin()
    library.load_dataset = lambda path, config, *, split, streaming: Loaded(
        {"text": f"{split} {i}", "stars": -1 if i == 5 else i % 2} for i in range(6)
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setenv("ACP_REPRO_CACHE", str(tmp_path))
    found = read_labelled("hf", "owner/name", label_field="stars", dev="valid", test="test")
    assert found.classes == ("bad", "good") and found.classes_are == "values of stars"
    assert [(e.text, e.number) for e in found.splits["dev"]] == [(f"valid {i}", i % 2) for i in range(5)]


def test_a_local_folder_that_changes_is_read_again(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    for text in ("one", "two"):
        (tmp_path / "set" / "train.txt").write_text(text * 9)
        records = ({"text": f"{text} {i}"} for i in range(9))
        monkeypatch.setitem(sys.modules, "datasets", standin(records))
        corpus = prepare(hf(str(tmp_path / "set")), tmp_path / "cache")
        assert corpus.tokenizer.decode(corpus.tokens("train")).startswith(text)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (None, r"cannot be read .*pip install '\.\[hf\]'"),
        (standin(error=ConnectionError("no\n route")), r"cannot be read \(no route\); .*network"),
        (standin([{"text": " "}]), "path: owner/name, split train, holds no text"),
    ],
)
def test_a_failure_is_one_line_and_leaves_no_entry(tmp_path, monkeypatch, library, message):
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(DataError, match=message) as caught:
        prepare(hf(), tmp_path)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
