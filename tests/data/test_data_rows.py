"""Files of records: CSV in the layout of Kaggle's Yelp reviews, and JSON lines."""

import csv
import gzip
import lzma
import tarfile
from pathlib import Path

import pytest

from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.rows import read_records

# The first line of the file, and rows as it has them: line breaks and doubled quotes within a field.
HEADER = "business_id,date,review_id,stars,text,type,user_id,cool,useful,funny"
ROWS = (
    '9yK,2011-01-26,fWK,5,"My wife took me here, on my birthday.\n\nIt was the best ""toast"" I\'ve had.",'
    "review,rLt,2,5,0\nZRJ,2011-07-27,IjZ,4,Good.,review,0a2,0,0,0\n"
)
KAGGLE = Path(__file__).parents[2].parent / "shared/data/yelp/yelp.tar.xz"


@pytest.mark.parametrize("name", ["yelp.csv", "yelp.csv.xz", "yelp.csv.gz"])
def test_csv_with_line_breaks_and_quotes_in_its_fields(tmp_path, name):
    path = tmp_path / name
    data = f"{HEADER}\n{ROWS}".encode()
    path.write_bytes({".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(data))
    rows = [record for _, record in read_records(path)]
    assert [row["stars"] for row in rows] == ["5", "4"] and list(rows[0]) == HEADER.split(",")
    assert rows[0]["text"] == ('My wife took me here, on my birthday.\n\nIt was the best "toast" I\'ve had.')


def test_a_field_of_any_length(tmp_path):
    path = tmp_path / "long.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], ["x" * 300_000]])
    assert [len(row["text"]) for _, row in read_records(path)] == [300_000]


def test_json_lines(tmp_path):
    path = tmp_path / "some.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"text": "a"}\n{"text": "b", "label": 1}\n'))
    assert list(read_records(path)) == [
        (f"{path}:1", {"text": "a"}),
        (f"{path}:2", {"text": "b", "label": 1}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text,stars\nshort\n", "a.csv:2: a row without the columns text, stars"),
        ("a.csv", "text,stars\none,2,3\n", "a.csv:2: a row without the columns"),
        ("a.csv", 'text,stars\nfine,1\n"open,2\nx,3\n', r"a.csv:3: not valid CSV \(.*close each quote"),
        ("a.jsonl", '{"text": "a"}\nb\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: a JSON list, not an object"),
    ],
)
def test_what_is_of_another_layout_is_named_with_its_line(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        list(read_records(tmp_path / name))


def test_csv_in_another_encoding_is_to_be_converted(tmp_path):
    (tmp_path / "latin.csv").write_bytes("text,stars\ncafé,5\n".encode("latin-1"))
    with pytest.raises(DataError, match="latin.csv: byte 0xe9 is not UTF-8; convert the file to UTF-8$"):
        list(read_records(tmp_path / "latin.csv"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="none.csv is no file"):
        list(read_records(tmp_path / "none.csv"))


@pytest.mark.skipif(not KAGGLE.is_file(), reason="put yelp.tar.xz into ../shared/data/yelp")
def test_kaggles_own_file(tmp_path):
    with tarfile.open(KAGGLE) as archive:
        (member,) = (m for m in archive if m.name.endswith("/yelp.csv"))
        (tmp_path / "yelp.csv").write_bytes(archive.extractfile(member).read())
    rows = [record for _, record in read_records(tmp_path / "yelp.csv")]
    assert len(rows) == 10_000 and list(rows[0]) == HEADER.split(",")
    assert {row["stars"] for row in rows} == set("12345") and all(row["text"].strip() for row in rows)
