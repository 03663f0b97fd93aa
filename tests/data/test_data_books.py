"""The books' shards, built from clones of the repositories that hold them."""

import hashlib
import json
import lzma
from collections import Counter

import pytest

from acp_repro.data import DataError, books, prepare
from acp_repro.data.book_texts import read
from acp_repro.data.books import Book
from acp_repro.data.sources import TextSource

LONG = "This line was broken where a page of a printed book ended,"
FILES = {
    "classic-books-markdown": (
        "A/B.md",
        "# Title: B\n\n## Author: A\n\n-------\n_Part_ \r\n\r\n\r\n\r\n\r\nOne\ufeff\u2014two.\r\n\n",
        "_Part_\n\n\nOne\u2014two.\n",
    ),
    "100_english_novels": (
        "corpus/C.txt",
        f"\ufeff{LONG}\r\nand went on.\r\n\r\nRoses are red\r\nand short\r\n\r\n    {LONG}\r\n    kept\r\n",
        f"{LONG} and went on.\n\nRoses are red\nand short\n\n    {LONG}\n    kept\n",
    ),
    "gender_novels": (
        "texts/d.txt",
        "The Project Gutenberg EBook of D\n\n*** START OF THIS PROJECT GUTENBERG EBOOK D ***\n\n"
        f"Produced by\nX\n\n\nD\n\n{LONG}\nso it was.\n\nFIN\n\n\n"
        "End of Project Gutenberg's D\n\n*** END OF THIS PROJECT GUTENBERG EBOOK\n\nlicence\n",
        f"D\n\n{LONG} so it was.\n\nFIN\n",
    ),
    "ELTeC-eng": (
        "level1/e.xml",
        "<TEI><teiHeader>no</teiHeader><text><div><head>I</head>"
        '<p>A &amp; B,\n   <hi>C</hi><pb n="1"/> D.</p></div>'
        "<div><l>E</l><l>F</l><note>no</note></div></text></TEI>",
        "I\n\nA & B, C D.\n\n\nE\n\nF\n",
    ),
}


@pytest.fixture
def clones(tmp_path):
    for source, (path, content, _) in FILES.items():
        file = tmp_path / "clones" / source / path
        file.parent.mkdir(parents=True)
        file.write_text(content, encoding="utf-8", newline="")
    return tmp_path / "clones"


@pytest.fixture
def small(monkeypatch):
    """A manifest of four books in two shards, and the shards' hashes."""
    listed = [
        Book(f"0{i % 2}", f"id{i}", source, "T", "A", path, hashlib.sha256(text.encode()).hexdigest())
        for i, (source, (path, _, text)) in enumerate(FILES.items())
    ]
    listed.sort()
    hashes = {}
    for shard in ("00", "01"):
        lines = [
            json.dumps({**dict(list(book._asdict().items())[1:5]), "text": FILES[book.source][2]}) + "\n"
            for book in listed
            if book.shard == shard
        ]
        lines = [line.replace("\\u2014", "\u2014") for line in lines]
        hashes[shard] = hashlib.sha256("".join(lines).encode()).hexdigest()
    monkeypatch.setattr(books, "SHARDS", hashes)
    monkeypatch.setattr(books, "manifest", lambda: listed)
    return listed


@pytest.mark.parametrize("source", FILES)
def test_texts(source):
    _, content, text = FILES[source]
    assert read(content.encode(), source) == text


def test_a_file_that_is_no_utf8_and_one_that_is_no_tei():
    assert read("\u201cCaf\u00e9\u201d".encode("cp1252"), "100_english_novels") == "\u201cCaf\u00e9\u201d\n"
    with pytest.raises(DataError, match="no <text> of TEI"):
        read(b"<html></html>", "ELTeC-eng")


def test_the_manifest():
    listed = books.manifest()
    assert len(listed) == len({book.id for book in listed}) == len({book.sha256 for book in listed}) == 819
    assert {book.source for book in listed} == set(books.REPOSITORIES) == set(FILES)
    assert [book.shard for book in listed] == sorted(book.shard for book in listed)
    assert {book.shard for book in listed} == set(books.SHARDS)


def test_shards_as_known_and_kept(clones, small, tmp_path, capsys):
    out = tmp_path / "out"
    assert books.main(["--clones", str(clones), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "4 books equal" in said and "Every shard holds the known bytes." in said
    texts = {d.data.decode() for d in TextSource([out]).documents()}
    assert texts == {text for *_, text in FILES.values()}

    first, second = sorted(out.iterdir())
    before = first.stat().st_mtime_ns
    second.write_bytes(second.read_bytes()[:-20])  # as if stopped in the middle by something ruder than us
    differences, counts = books.build(clones, out)
    assert not differences and counts == Counter(kept=2, equal=2)
    assert first.stat().st_mtime_ns == before
    assert [path.name for path in sorted(out.iterdir())] == [first.name, second.name]


def test_what_differs_is_said(clones, small, tmp_path, capsys):
    gone, other = (clones / small[i].source / small[i].path for i in (0, 2))
    gone.unlink()
    other.write_text("another text\n")
    assert books.main(["--clones", str(clones), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"books_core_00.jsonl.xz is not as known: 1 of 2 books differ ({small[0].id} missing)" in said
    assert f"1 of 2 books differ ({small[2].id} changed)" in said
    assert "1 books changed, 2 books equal, 1 books missing" in said and "9448827" in said


def test_a_missing_clone_names_its_command(tmp_path, capsys):
    (tmp_path / "gender_novels").mkdir()
    assert books.main(["--clones", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: --clones: 3 missing in {tmp_path}; run: git clone https://github.com/")
    assert said.count("\n") == 1 and said.count("git clone") == 3 and "dhmit" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["path", "heldout"])
def test_missing_books_name_the_command(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("A")
    paths = {"path": "a.txt", key: "data/books/books_core_07.jsonl.xz"}
    with pytest.raises(DataError, match=rf"{key}: data/books/.*python -m acp_repro\.data\.books --clones"):
        prepare({"corpus": "text", **paths}, tmp_path / "cache")


def test_a_book_is_written_as_it_was(clones, small, tmp_path):
    books.build(clones, tmp_path)
    line = lzma.decompress((tmp_path / "books_core_00.jsonl.xz").read_bytes()).splitlines()[0]
    assert list(json.loads(line)) == ["id", "source", "title", "author", "text"]
    assert "\u2014".encode() in line  # as UTF-8, not escaped
