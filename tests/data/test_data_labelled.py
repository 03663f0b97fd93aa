"""Labelled sets: each reader on small files of its set's layout."""

import itertools
import json
import lzma
import tarfile

import pytest

from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.labelled import SPLITS, read_labelled
from acp_repro.pipeline.data.registry import CORPORA


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


def test_sets_of_hugging_face_by_name_or_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    monkeypatch.setenv("ACP_REPRO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        rows = [{"sentence": f"{split} text {i}", "label": i % 2} for i in range(60)]
        write_lines(tmp_path / "set" / f"{split}.jsonl", rows)
    found = read_labelled("hf", str(tmp_path / "set"), text_field="sentence", test="test")
    assert found.classes == ("0", "1") and len(found.splits["test"]) == 60
    assert len(found.splits["train"]) + len(found.splits["dev"]) == 60 and found.splits["dev"]
    with pytest.raises(DataError, match="text_field: 'text' holds NoneType .*are: sentence, label"):
        read_labelled("hf", str(tmp_path / "set"))
    with pytest.raises(DataError, match="label_field: 'stars' holds NoneType .*are: sentence, label"):
        read_labelled("hf", str(tmp_path / "set"), text_field="sentence", label_field="stars")
    (tmp_path / "qa").mkdir()
    for split in ("train", "validation"):
        rows = [
            {
                "context": f"It is {i} now.",
                "question": "What?",
                "answers": {"text": [str(i)], "answer_start": [6]},
            }
            for i in range(30)
        ]
        write_lines(tmp_path / "qa" / f"{split}.jsonl", rows)
    fields = {"text_field": "context", "question_field": "question", "answers_field": "answers"}
    options = {**fields, "test": "validation"}
    found = read_labelled("hf", str(tmp_path / "qa"), **options)
    example = found.splits["test"][3]
    assert found.is_extractive and example.text[slice(*example.answer)] == example.answers[0] == "3"


def test_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="corpus: 'nope' is not known; use stdlib, text, .* or qasper$"):
        read_labelled("nope")
    with pytest.raises(
        DataError, match="path: None, but `corpus: sst2` needs the path of its folder or .tar"
    ):
        read_labelled("sst2")
    with pytest.raises(DataError, match="is no file; relative paths start at"):
        read_labelled("imdb", str(tmp_path / "no.jsonl"))
    with pytest.raises(DataError, match="options.lest: unknown; the options of `corpus: cuad` are least"):
        read_labelled("cuad", str(tmp_path), lest=3)
    (tmp_path / "bad.jsonl").write_text('{"file": 1}\n')
    with pytest.raises(DataError, match="bad.jsonl:1: no field 'type'; this line has: file"):
        read_labelled("cuad", str(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match="bad.jsonl:1: not JSON"):
        read_labelled("cuad", str(tmp_path / "bad.jsonl"))
    (tmp_path / "cut.tar.xz").write_bytes(lzma.compress(b"no tar"))
    with pytest.raises(DataError, match="is no archive, or a damaged one .*copy it again"):
        read_labelled("csabstruct", str(tmp_path / "cut.tar.xz"))
    one = [{"file": str(i), "type": "a", "text": "t"} for i in range(20)]
    with pytest.raises(DataError, match="one.jsonl has one class, a; add texts of another"):
        read_labelled("cuad", str(write_lines(tmp_path / "one.jsonl", one)))
    empty = str(write_lines(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match="path: .*empty.jsonl gives no text; name one that does$"):
        read_labelled("imdb", empty)
    with pytest.raises(DataError, match="empty.jsonl gives no text; .* does, or set options.least$"):
        read_labelled("cuad", empty)
    blank = str(write_lines(tmp_path / "blank.jsonl", [{"text": "t", "label": ""}]))
    with pytest.raises(DataError, match="blank.jsonl gives no text with a label .*, or set options.label_fi"):
        read_labelled("file", blank)
    assert set(CORPORA) >= {"sst2", "imdb", "cuad", "csabstruct", "books", "facts", "qasper", "hf", "file"}
