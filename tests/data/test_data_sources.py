"""Sources of documents: selection, order, identity and all errors."""

import bz2
import gzip
import json
import lzma

import pytest
from fsspec.compression import zstd
from hypothesis import given
from hypothesis import strategies as st

from acp_repro.pipeline.data.corpora import file
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Document, StdlibSource, TextSource, cut_tail, is_heldout

PACK = {
    "": lambda data: data,
    ".xz": lzma.compress,
    ".gz": lambda data: gzip.compress(data, mtime=0),  # a time stamp would change the test id
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
}
TEXTS = ["naïve café\n" * 3, "second\r\nline", "third " * 50_000, "日本語 🐍"]


def texts(source):
    return [document.data.decode() for document in source.documents()]


def as_jsonl(field="text"):
    return "".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(TEXTS)).encode()


# ---- the standard library ------------------------------------------------------------------


def write_files(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_stdlib_excludes_tests_tables_and_third_party_code(tmp_path):
    left_out = (
        "test/test_json.py",
        "json/tests/test_a.py",
        "site-packages/json.py",
        "stranger.py",
        "encodings/cp037.py",
        "html/entities.py",
        "_sysconfigdata_linux.py",
        "json/data.txt",
    )
    modules = {"json.py": b"import this\r\n", "json/tool.py": b"x = 1\n"}
    blank = {"empty.py": b"", "abc.py": b" \n"}
    root = write_files(tmp_path / "a", modules | blank | dict.fromkeys(left_out, b"no"))
    source = StdlibSource(root, topics={"for": "The for statement"})
    assert {d.name: d.data for d in source.documents()} == {
        "json.py": b"import this\n",
        "json/tool.py": b"x = 1\n",
        "help/for": b"The for statement",
    }
    unix = write_files(tmp_path / "b", modules | {"json.py": b"import this\n"})
    assert StdlibSource(unix, {"for": "The for statement"}).identity == source.identity
    assert StdlibSource(unix, {"for": "The for"}).identity != source.identity
    assert StdlibSource(unix, {"FOR": "The for statement"}).identity != source.identity


# ---- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", PACK)
def test_round_trip(tmp_path, suffix):
    """Covers files with several compressed frames."""
    for i, text in enumerate(TEXTS):
        parts = text[:5].encode(), text[5:].encode()
        (tmp_path / f"{i}.txt{suffix}").write_bytes(b"".join(map(PACK[suffix], parts)))
    assert texts(TextSource([tmp_path])) == TEXTS
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](as_jsonl("body")))
    source = TextSource([path], "body")
    assert texts(source) == TEXTS
    assert [d.name for d in source.documents()] == [f"{path.name}:{i}" for i in (1, 2, 3, 4)]


def test_folder_is_read_recursively_in_order_without_hidden_or_blank_files(tmp_path):
    files = {"b/2.txt": b"B2", "a.md": b"A", "b/1": b"B1", ".git/config": b"no", "c/.hidden": b"no"}
    write_files(tmp_path, files | {"blank": b" \n", "bom": b"\xef\xbb\xbfmark"})
    assert [d.name for d in TextSource([tmp_path]).documents()] == ["a.md", "b/1", "b/2.txt", "bom"]
    assert texts(TextSource([tmp_path])) == ["A", "B1", "B2", "mark"]
    left = TextSource([tmp_path], exclude=[tmp_path / "b", tmp_path / "bom"])
    assert texts(left) == ["A"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "A.NDJSON.ZST", "a.Json.XZ"])
@pytest.mark.parametrize("form", ["lines", "array", "indented"])
def test_json_files_of_every_suffix_and_form_are_read(tmp_path, name, form):
    records = [{"id": 1, "body": "one [1]"}, "two", " ", {"body": "three"}]
    lines = "\ufeff" + "\n\n".join(map(json.dumps, records))
    text = lines if form == "lines" else json.dumps(records, indent=2 if form == "indented" else None)
    path = tmp_path / name
    path.write_bytes(PACK[path.suffix.lower().replace(".json", "")](text.encode()))
    assert texts(TextSource([path], "body")) == ["one [1]", "two", "three"]
    assert [row.text for row in file(str(path), "body")] == ["one [1]", "two", " ", "three"]


def test_links_are_followed_without_cycles(tmp_path):
    write_files(tmp_path, {"disk/b.txt": b"B", "corpus/a.txt": b"A", "corpus/deep/blank": b""})
    corpus = tmp_path / "corpus"
    links = {"file.txt": "disk/b.txt", "shards": "disk", "deep/up": "corpus"}
    for link, target in links.items():
        (corpus / link).symlink_to(tmp_path / target)
    (tmp_path / "disk/back").symlink_to(corpus)
    assert texts(TextSource([corpus])) == ["A", "B", "B"]
    assert texts(TextSource([corpus], exclude=[tmp_path / "disk/b.txt"])) == ["A"]
    (corpus / "lost").symlink_to(tmp_path / "unmounted")
    with pytest.raises(DataError, match="path: .*corpus/lost does not exist or is a broken link"):
        TextSource([corpus])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n[1]\n', r"a\.jsonl:3: not an object"),
        ("a.json", b'{"name": "settings"}', r"a\.json:1: no field 'text'; this record has: name"),
        ("a.json", b'{\n "text": "x"\n}\n', r"a\.json:1: not JSON .*; write one object per line, or"),
        ("a.json", b'["x", 3]', r"a\.json:entry 2: not an object"),
        ("a.ndjson", b'["x",\n', r"a\.ndjson:1: not JSON"),
        ("a.json", b"[" * 100_000, r"a\.json:1: not JSON"),
        ("a.jsonl", b'{"body": "x"}', r"a\.jsonl:1: no field 'text'; .*has: body"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl:1: the field 'text' contains int, not text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"a\.jsonl:2: not JSON in UTF-8"),
        ("a.txt", b"fine\nfine\ncaf\xe9\n", r"a\.txt:3: the byte 0xe9 is not UTF-8 text"),
        ("a.png", b"fine\n" * 9999 + b"\0\n", r"a\.png:10000: the byte 0x00 is not UTF-8 .*from the folder"),
        ("a.txt.xz", PACK[".xz"](as_jsonl())[:-30], r"a\.txt\.xz: cannot be read .*truncated"),
        ("a.txt.gz", b"no gz", r"a\.txt\.gz: cannot be read .*copy it again"),
        ("a.jsonl.zst", PACK[".zst"](as_jsonl())[:-9], r"a\.jsonl\.zst: cannot be read .*truncated"),
    ],
)
def test_damaged_file_is_reported_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(TextSource([tmp_path]).documents())
    assert "\n" not in str(caught.value)


# ---- the split -----------------------------------------------------------------------------


def test_split_is_stable_and_has_the_requested_share():
    documents = [Document(str(i), b"", str(i).encode()) for i in range(4000)]
    held = {d.name for d in documents if is_heldout(d.split_key, 0.1)}
    assert 300 < len(held) < 500
    assert held >= {d.name for d in documents if is_heldout(d.split_key, 0.05)}  # a larger share only adds
    assert not any(is_heldout(d.split_key, 0) for d in documents)


def test_adding_renaming_or_resharding_documents_preserves_the_split(tmp_path):
    lines = [json.dumps({"text": f"text {i}"}).encode() for i in range(60)]
    shards = {"one": {"a.jsonl": lines[:40]}, "two": {"x.jsonl": lines[30:], "y.jsonl": lines[:30]}}
    held = {}
    for folder, files in shards.items():
        write_files(tmp_path / folder, {name: b"\n".join(part) for name, part in files.items()})
        documents = TextSource([tmp_path / folder]).documents()
        held[folder] = {d.data for d in documents if is_heldout(d.split_key, 0.3)}
    old = {f"text {i}".encode() for i in range(40)}
    assert held["one"] and held["two"] & old == held["one"]
    assert held["two"] - old  # and new ones are held out too


@given(st.text(st.sampled_from("ab \n\u00e9\u65e5"), max_size=80), st.floats(0.01, 0.99))
def test_tail_and_remainder_form_the_document(text, share):
    parts = cut_tail(Document("a", text.encode(), b""), share)
    if parts is not None:
        head, tail = (part.data.decode() for part in parts)
        assert head + tail == text and head.strip() and tail.strip()
        assert len(tail.encode()) <= len(text.encode()) * share + 2  # at most the requested share


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("one\ntwo\n\nthree\n\nfour five six seven eight", "four five six seven eight"),
        ("one two three four\nfive six seven eight nine", "five six seven eight nine"),
        ("one two three four five six", "four five six"),
        ("\u65e5" * 20, "\u65e5" * 12),
        ("one" + " " * 40, None),
    ],
)
def test_tail_starts_at_a_natural_boundary(text, tail):
    parts = cut_tail(Document("a", text.encode(), b""), 0.6)
    assert (parts and parts[1].data.decode()) == tail
