"""Labelled sets: each reader on small files of its set's layout."""

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


def write_lines(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return path


def write_tar(path, files):
    folder = path.parent / "content"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with tarfile.open(path, "w:xz") as archive:
        archive.add(folder, "set")
    return path


def test_sst2_from_a_tar_and_a_folder(tmp_path):
    files = {f"x/{s}.tsv": f'sentence\tlabel\n{s} "good \t1\nbad {s}\t0\n' for s in SPLITS}
    path = write_tar(tmp_path / "sst2.tar.xz", files)
    found = read_labelled("sst2", str(path))
    assert found.classes == ("0", "1") and not found.is_extractive
    assert [(e.text, e.number) for e in found.splits["dev"]] == [('dev "good', 1), ("bad dev", 0)]
    again = read_labelled("sst2", str(tmp_path / "content"))
    assert again.splits == found.splits and again.identity == found.identity
    (tmp_path / "content/x/dev.tsv").write_text("text\tlabel\na\t1\n")
    with pytest.raises(DataError, match="dev.tsv: needs the columns sentence and label"):
        read_labelled("sst2", str(tmp_path / "content"))


def test_imdb_keeps_its_test_split_and_takes_dev_from_train(tmp_path):
    records = [
        {"split": split, "label": i % 2, "id": i, "text": f"a film<br />\u0085number {i} {split}"}
        for split in ("train", "test", "unsup")
        for i in range(200)
    ]
    found = read_labelled("imdb", str(write_lines(tmp_path / "imdb.jsonl.xz", records)))
    sizes = {split: len(found.splits[split]) for split in SPLITS}
    assert sizes["test"] == 200 and sizes["train"] + sizes["dev"] == 200 and 8 <= sizes["dev"] <= 40
    assert all("test" in e.text and "<br" not in e.text for e in found.splits["test"])


def test_cuad_splits_by_document_and_leaves_out_rare_types(tmp_path):
    records = [
        {"file": f"{t}{i}.txt", "type": t, "text": f"agreement {t} {i}"} for t in "ab" for i in range(40)
    ]
    path = write_lines(tmp_path / "cuad.jsonl.xz", [*records, {"file": "c", "type": "c", "text": "rare"}])
    found = read_labelled("cuad", str(path), least=10)
    assert found.classes == ("a", "b") and sum(map(len, found.splits.values())) == 80
    assert min(map(len, found.splits.values())) > 0
    assert len(read_labelled("cuad", str(path), least=1).classes) == 3
    # A document more moves none of the others.
    more = write_lines(tmp_path / "more.jsonl", [*records, {"file": "new", "type": "a", "text": "new"}])
    moved = read_labelled("cuad", str(more), least=10)
    for split in SPLITS:
        assert [e for e in moved.splits[split] if e.text != "new"] == found.splits[split]


def test_csabstruct_asks_each_sentence_of_its_abstract(tmp_path):
    record = {"abstract_id": 0, "sentences": ["We try.", "It works."], "labels": ["method", "result"]}
    files = {f"{split}.jsonl": json.dumps(record) + "\n" for split in SPLITS}
    found = read_labelled("csabstruct", str(write_tar(tmp_path / "cs.tar.xz", files)))
    assert [(e.question, e.text, e.number) for e in found.splits["test"]] == [
        ("We try.", "We try. It works.", 0),
        ("It works.", "We try. It works.", 1),
    ]


def test_books_of_an_author_are_split_by_book(tmp_path):
    records = [
        {"id": f"{a}{i}", "author": a, "text": f"{a}{i} " * 100} for a in ("Eliot", "Hardy") for i in range(5)
    ] + [{"id": "x", "author": "Once", "text": "alone " * 100}]
    write_lines(tmp_path / "books_00.jsonl.xz", records)
    found = read_labelled("books", str(tmp_path), characters=100, most_each=3)
    assert found.classes == ("Eliot", "Hardy")
    where = {}
    for split in SPLITS:
        assert {e.number for e in found.splits[split]} == {0, 1}
        for e in found.splits[split]:
            where.setdefault(e.text.split()[1], set()).add(split)
            assert len(e.text) == 100
    assert all(len(splits) == 1 for splits in where.values()) and len(where) == 10


def test_facts_are_planted_and_answer_the_question(tmp_path):
    (tmp_path / "text.txt").write_text("the fields lay quiet under the snow " * 200)
    found = read_labelled(
        "facts", str(tmp_path / "text.txt"), examples=60, characters=300, facts=3, classes=4
    )
    assert len(found.classes) == 4
    for example in itertools.chain(*found.splits.values()):
        name = example.question.removeprefix("What is the code of ").removesuffix("?")
        assert f"The code of {name} is {found.classes[example.number]}." in example.text
        assert example.text.count("The code of") == 3
    again = read_labelled(
        "facts", str(tmp_path / "text.txt"), examples=60, characters=300, facts=3, classes=4
    )
    assert again.identity == found.identity


def test_short_texts_with_facts_are_for_training_alone(tmp_path):
    """The long ones are those of a set without short ones."""
    (tmp_path / "text.txt").write_text("the fields lay quiet under the snow " * 2000)
    settings = {"examples": 60, "characters": 3000, "facts": 3, "classes": 4}
    alone = read_labelled("facts", str(tmp_path / "text.txt"), **settings)
    found = read_labelled("facts", str(tmp_path / "text.txt"), short=40, short_characters=300, **settings)
    texts = {split: [e.text for e in found.splits[split]] for split in SPLITS}
    short = [text for text in texts["train"] if len(text) < 600]
    assert len(short) == 40 and all(text.count("The code of") == 3 for text in short)
    assert min(map(len, texts["dev"] + texts["test"])) > 3000 and texts["dev"] and texts["test"]
    long = set(itertools.chain(*texts.values())) - set(short)
    assert long == {e.text for e in itertools.chain(*alone.splits.values())}


def test_qasper_finds_answers_that_stand_in_the_text(tmp_path):
    records = [
        {"input": f"Paper {i} uses relu here.", "instructions": ["Which?", "Why?"], "outputs": ["relu", "no"]}
        for i in range(20)
    ]
    found = read_labelled("qasper", str(write_lines(tmp_path / "q.jsonl", records)))
    assert found.is_extractive
    examples = list(itertools.chain(*found.splits.values()))
    assert len(examples) == 20 and all(e.text[slice(*e.answer)] == "relu" for e in examples)


def test_stdlib_hides_the_packages_own_name():
    found = read_labelled("stdlib_packages", classes=4, characters=300, most_each=40)
    assert len(found.classes) == 4
    for split in SPLITS:
        assert found.splits[split]
        for e in found.splits[split]:
            assert found.classes[e.number] not in e.text.replace("_", " ").split()


def test_csv_has_labels_too_and_line_breaks_in_its_fields(tmp_path):
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
        ("sst2", "no.tar", None, "path: .*no.tar is no folder and no .tar"),
        ("imdb", "no.jsonl", None, "path: .*no.jsonl is no file"),
        ("imdb", "empty.jsonl", b"", "path: .*empty.jsonl has texts of 0 classes; two are needed"),
        ("file", "one.csv", b"text,label\na,1\nb,1\n", "path: .*one.csv has texts of 1 classes"),
    ],
)
def test_a_damaged_or_missing_set_is_one_line(tmp_path, corpus, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_labelled(corpus, str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_function_of_a_notebook_is_a_corpus():
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
