"""Labelled sets: each reader on small files with the layout of its dataset."""

import csv
import gzip
import itertools
import json
import lzma
import tarfile

import pytest

from acp_repro.pipeline.data.corpora import CORPORA, corpus, find_corpus
from acp_repro.pipeline.data.files import DataError, read_records
from acp_repro.pipeline.data.labelled import SPLITS, read_labelled
from acp_repro.pipeline.data.sources import Row


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def write_lines(path, records):
    text = lines(*records).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return str(path)


ABSTRACT = {"abstract_id": 0, "sentences": ["We try.", "It works."], "labels": ["method", "result"]}
REVIEW = {"label": 1, "text": "a film<br />\u0085of note"}
PAPER = {"input": "We use relu.", "instructions": ["Which?", "Why?"], "outputs": ["relu", "no"]}
READERS = {  # the files of a set, options, and the expected rows
    "sst2": (
        {f"x/{s}.tsv": f'sentence\tlabel\n{s} "good \t1\n' for s in SPLITS},
        {},
        [Row(f'{s} "good', "1", split=s) for s in SPLITS],
    ),
    "csabstruct": (
        {f"{s}.jsonl": lines(ABSTRACT) for s in SPLITS},
        {},
        [
            Row("We try. It works.", label, asked, split=s)
            for s in SPLITS
            for asked, label in (("We try.", "method"), ("It works.", "result"))
        ],
    ),
    "imdb": (
        {"imdb.jsonl": lines({"split": "test", **REVIEW}, {"split": "unsup", **REVIEW})},
        {},
        [Row("a film \u0085of note", "1", split="test"), Row("a film \u0085of note")],
    ),
    "cuad": (
        {"cuad.jsonl": lines(*({"file": f, "type": t, "text": f} for f, t in ("1a", "2a", "3b")))},
        {"least": 2},
        [Row("1", "a", group="1"), Row("2", "a", group="2")],
    ),
    "qasper": (
        {"q.jsonl": lines(PAPER)},
        {},
        [Row("We use relu.", None, "Which?", (7, 11), ("relu",), group="We use relu.")],
    ),
}


@pytest.mark.parametrize("is_archive", [False, True])
@pytest.mark.parametrize("name", READERS)
def test_labelled_files_are_read_as_rows(tmp_path, name, is_archive):
    files, options, rows = READERS[name]
    for place, text in files.items():
        (tmp_path / "set" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / place).write_text(text)
    path = tmp_path / "set"
    if is_archive and name in ("sst2", "csabstruct", "qasper"):
        path = tmp_path / "set.tar.xz"
        with tarfile.open(path, "w:xz") as archive:
            archive.add(tmp_path / "set", "set")
    elif len(files) == 1:
        (path,) = path.iterdir()
    assert list(find_corpus(name).open(str(path), options).rows()) == rows


def test_dev_split_is_taken_from_train(tmp_path):
    records = [
        {"split": split, "label": i % 2, "text": f"{i} {split}"}
        for split in ("train", "test", "unsup")
        for i in range(200)
    ]
    found = read_labelled("imdb", write_lines(tmp_path / "imdb.jsonl.xz", records))
    train, dev, test = (len(found.splits[split]) for split in SPLITS)
    assert test == 200 and train + dev == 200 and 8 <= dev <= 40
    assert all("test" in row.text for row in found.splits["test"])


def test_group_split_is_stable_under_added_groups(tmp_path):
    records = [{"file": f"{t}{i}", "type": t, "text": f"agreement {t} {i}"} for t in "ab" for i in range(40)]
    found = read_labelled("cuad", write_lines(tmp_path / "cuad.jsonl.xz", records))
    assert found.classes == ("a", "b") and not found.is_extractive and all(found.splits.values())
    more = write_lines(tmp_path / "more.jsonl", [*records, {"file": "new", "type": "a", "text": "new"}])
    moved = read_labelled("cuad", more)
    for split in SPLITS:
        assert [row for row in moved.splits[split] if row.text != "new"] == found.splits[split]
    assert moved.identity != found.identity


def test_books_of_an_author_are_split_by_book(tmp_path):
    records = [
        {"id": f"{a}{i}", "author": a, "text": f"{a}{i} " * 100} for a in ("Eliot", "Hardy") for i in range(5)
    ] + [{"id": "x", "author": "Once", "text": "alone " * 100}]
    write_lines(tmp_path / "books_00.jsonl.xz", records)
    found = read_labelled("books", str(tmp_path), characters=100, most_each=3)
    assert found.classes == ("Eliot", "Hardy")
    books = [{row.group for row in found.splits[split]} for split in SPLITS]
    assert sum(map(len, books)) == len(set().union(*books)) == 10
    for split in SPLITS:
        assert {row.number for row in found.splits[split]} == {0, 1}
        assert all(len(row.text) == 100 for row in found.splits[split])


def test_facts_are_planted_and_short_texts_are_used_only_for_training(tmp_path):
    """Long documents equal those of a set without short documents."""
    (tmp_path / "text.txt").write_text("the fields lay quiet under the snow " * 2000)
    settings = {"examples": 60, "characters": 3000, "facts": 3, "classes": 4}
    alone = read_labelled("facts", str(tmp_path / "text.txt"), **settings)
    found = read_labelled("facts", str(tmp_path / "text.txt"), short=40, short_characters=300, **settings)
    assert len(found.classes) == 4
    for example in itertools.chain(*found.splits.values()):
        name = example.question.removeprefix("What is the code of ").removesuffix("?")
        assert f"The code of {name} is {found.classes[example.number]}." in example.text
        assert example.text.count("The code of") == 3
    texts = {split: {e.text for e in found.splits[split]} for split in SPLITS}
    short = {text for text in texts["train"] if len(text) < 600}
    assert len(short) == 40 and texts["dev"] and texts["test"]
    assert set().union(*texts.values()) - short == {e.text for e in itertools.chain(*alone.splits.values())}


def test_stdlib_masks_the_package_name():
    found = read_labelled("stdlib_packages", classes=4, characters=300, most_each=40)
    assert len(found.classes) == 4 and all(found.splits.values())
    for row in itertools.chain(*found.splits.values()):
        assert found.classes[row.number] not in row.text.replace("_", " ").split()


def test_csv_supports_labels_and_line_breaks_in_fields(tmp_path):
    """In the layout of Kaggle's Yelp reviews."""
    row = '9yK,{},"My wife took me, on my birthday.\n\nIt was the best ""toast"" I\'ve had, {}.",review\n'
    path = tmp_path / "yelp.csv.gz"
    data = "business_id,stars,text,type\n" + "".join(row.format(i % 2 + 4, i) for i in range(40))
    path.write_bytes(gzip.compress(data.encode()))
    found = read_labelled("file", str(path), label_field="stars")
    assert found.classes == ("4", "5") and found.classes_are == "values of stars"
    text = found.splits["train"][0].text
    assert text.startswith('My wife took me, on my birthday.\n\nIt was the best "toast" I\'ve had')
    long = tmp_path / "long.csv"
    with long.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], ["x" * 300_000]])
    assert [len(row["text"]) for _, row in read_records(long)] == [300_000]


@pytest.mark.parametrize(
    ("corpus", "name", "content", "message"),
    [
        ("file", "a.csv", b"text,label\nshort\n", "a.csv:2: not valid CSV .*without the columns text, label"),
        ("file", "a.csv", b'text,label\nfine,1\n"open,2\nx,3\n', "a.csv:.*: not valid CSV"),
        ("file", "a.csv", "text,label\ncafé,5\n".encode("latin-1"), "a.csv:.*: not valid CSV in UTF-8"),
        ("cuad", "a.jsonl", b'{"file": 1}\n', "a.jsonl:1: no field 'type'; this record has: file"),
        ("cuad", "a.jsonl", b"{\n", "a.jsonl:1: not JSON"),
        ("csabstruct", "a.tar.xz", lzma.compress(b"no tar"), "a.tar.xz: cannot be read"),
        ("sst2", "no.tar", None, "path: .*no.tar is neither a folder nor a .tar"),
        ("imdb", "no.jsonl", None, "path: .*no.jsonl is not a file"),
        ("imdb", "empty.jsonl", b"", "path: .*empty.jsonl has texts of 0 classes; two are needed"),
        ("file", "one.csv", b"text,label\na,1\nb,1\n", "path: .*one.csv has texts of 1 classes"),
    ],
)
def test_damaged_or_missing_set_is_reported_in_one_line(tmp_path, corpus, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_labelled(corpus, str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_notebook_function_can_be_a_corpus():
    @corpus()
    def rhymes(verse: str = "a"):
        """Two lines."""
        return [Row(f"{verse} cat", group="a"), Row(f"{verse} hat", group="b")]

    try:
        source = find_corpus("rhymes").open(options={"verse": "the"})
        assert [row.text for row in source.rows()] == ["the cat", "the hat"]
        assert [document.data for document in source.documents()] == [b"the cat", b"the hat"]
        assert source.identity != find_corpus("rhymes").open().identity
    finally:
        del CORPORA["rhymes"]
