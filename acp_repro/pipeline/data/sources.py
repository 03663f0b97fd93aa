"""Where the texts come from: the standard library's own text, files on disk, or a function that gives rows.

A source gives texts in a fixed order: as `Document` for readers of text alone, and as `Row` with all that is
known of them. Its ``identity`` is a SHA-256 that changes if, and only if, the text changes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.resources
import lzma
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from acp_repro.common.digests import hash_number
from acp_repro.common.errors import usage_errors
from acp_repro.pipeline.data.files import DataError, check_text, is_json, json_records, open_plain, text_of

SPLITS = ("train", "dev", "test")  # of a labelled set


class Row(NamedTuple):
    """One text of a corpus, with what is known of it.

    Attributes:
        label: the name of its class, if the corpus has any.
        question: a question about the text; empty for none.
        answer: (start, end) of the answer's characters in ``text``, for a question without classes.
        answers: all answers in words, for their scores.
        split: ``train``, ``dev`` or ``test``, if the corpus comes split; else a hash decides.
        group: what it belongs to (its document, its book). A group is never split. Empty: it is its own
            group.
        number: the label as a number, if it has no name.
    """

    text: str
    label: str | None = None
    question: str = ""
    answer: tuple[int, int] | None = None
    answers: tuple[str, ...] = ()
    split: str | None = None
    group: str = ""
    number: float | None = None


class Document(NamedTuple):
    """One text. ``data`` is valid, non-blank UTF-8; the held-out split hashes ``split_key``."""

    name: str
    data: bytes
    split_key: bytes


def is_heldout(key: bytes, share: float) -> bool:
    """Whether the hash of ``key`` selects a text for a split of ``share`` (0 to 1) of all texts.

    The texts of a smaller share are also in every larger one.
    """
    return hash_number(key) < share * 2**64


def cut_tail(document: Document, share: float) -> tuple[Document, Document] | None:
    """A document without its last ``share`` (0 to 1) of bytes, and those bytes; None if either would be
    blank.

    The cut is in the first half of those bytes. It is at the first end of a paragraph, else of a line or a
    word, else between two characters.
    """
    data = document.data
    start = len(data) - int(len(data) * share)
    while start < len(data) and data[start] & 0xC0 == 0x80:  # inside a character of UTF-8
        start += 1
    for end in (rb"\n\s*\n", rb"\n", rb"\s"):
        if found := re.compile(end).search(data, max(start - 2, 0), (start + len(data)) // 2):
            start = found.end()
            break
    head, tail = data[:start], data[start:]
    if not head.strip() or not tail.strip():
        return None
    name = f"{document.name} (its tail)"
    return Document(document.name, head, head), Document(name, tail, tail)


class Source:
    """The interface of every corpus; ``identity`` stands for its text."""

    identity: str

    def documents(self) -> Iterator[Document]:
        """Gives the texts alone."""
        raise NotImplementedError

    def rows(self) -> Iterator[Row]:
        """Gives the texts with all that is known of them."""
        for document in self.documents():
            yield Row(document.data.decode())


class RowSource(Source):
    """The rows that a function gives, the same ones at each call."""

    def __init__(self, name: str, read: Callable[[], Iterable[Row]]):
        self._name, self._read = name, read

    def rows(self) -> Iterator[Row]:
        yield from self._read()

    def documents(self) -> Iterator[Document]:
        """Gives the texts. Rows in sequence with the same text and different questions are one document."""
        before = None
        for number, row in enumerate(self.rows(), 1):
            # Half of a surrogate pair is not a character, and UTF-8 cannot hold it.
            data = row.text.encode(errors="replace")
            if data.strip() and data != before:
                yield Document(f"{self._name}:{number}", data, row.group.encode() or data)
            before = data

    @functools.cached_property
    def identity(self) -> str:
        digest = hashlib.sha256(b"rows")
        for document in self.documents():
            digest.update(b"%d %d " % (len(document.split_key), len(document.data)))
            digest.update(document.split_key + document.data)
        return digest.hexdigest()


# Test suites are mostly data and repetition, and often not installed. `encodings` is a hundred near-copies of
# one generated character table. `pydoc_data` is read topic by topic.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
# Generated tables of code points, more digits than words.
_SKIPPED_FILES = {"stringprep.py", "html/entities.py", "re/_casefix.py"}


class StdlibSource(Source):
    """The sources of the running Python's standard library and the topics of its ``help()``.

    A module is one document, a help topic another. Line ends are normalised, so the bytes depend on the
    Python version alone. A distribution that patches or splits the library (Debian does) gives other bytes
    and another identity. The order is by a hash of the name, so any prefix is a fair sample. Held-out
    documents are chosen by name, so they are the same ones in the next Python version.

    Args:
        root: the library's folder (default: the running interpreter's).
        topics: maps a topic to its text (default: ``pydoc_data.topics``, where a distribution has them).
    """

    def __init__(self, root: Path | None = None, topics: dict[str, str] | None = None):
        root = Path(sysconfig.get_path("stdlib")) if root is None else root
        if topics is None:
            try:
                topics = importlib.import_module("pydoc_data.topics").topics
            except ImportError:
                topics = {}
        texts = {name: _read_module(path) for name, path in _stdlib_modules(root)}
        texts |= {f"help/{name}": text for name, text in topics.items()}
        texts = {name: text for name, text in texts.items() if text.strip()}
        assert texts, f"{root}: this Python comes without the sources of its standard library"
        by_hash = sorted(texts, key=lambda name: (hashlib.sha256(name.encode()).digest(), name))
        self._documents = [Document(name, texts[name].encode(), name.encode()) for name in by_hash]
        digest = hashlib.sha256(b"stdlib")
        for document in self._documents:
            digest.update(b"%d %s %d " % (len(document.name), document.split_key, len(document.data)))
            digest.update(document.data)
        self.identity = digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        yield from self._documents


def _stdlib_modules(root: Path) -> Iterator[tuple[str, Path]]:
    # The list of module names keeps out all else in that folder: site-packages, sitecustomize.py, and the
    # build's own settings (_sysconfigdata, config-3.x).
    for top in (path for path in root.iterdir() if path.stem in sys.stdlib_module_names):
        for path in [top] if top.suffix == ".py" else top.rglob("*.py"):
            name = path.relative_to(root).as_posix()
            if not _SKIPPED_FOLDERS.intersection(name.split("/")[:-1]) and name not in _SKIPPED_FILES:
                yield name, path


def _read_module(path: Path) -> str:
    with tokenize.open(path) as file:  # follows a coding line; gives "\n" for every line end
        return file.read()


class SampleSource(Source):
    """One whole book that comes with the package: *Wuthering Heights*, 0.65 MB.

    It is in the books' held-out shard. Of the suites' models only lap-english's was trained on it.
    """

    title = "Wuthering Heights (Emily Brontë, 1847)"

    def __init__(self):
        packed = importlib.resources.files(__package__).joinpath("sample", "wuthering_heights.txt.xz")
        data = lzma.decompress(packed.read_bytes())
        self._document = Document("wuthering_heights.txt", data, data)
        self.identity = hashlib.sha256(b"sample" + data).hexdigest()

    def documents(self) -> Iterator[Document]:
        yield self._document


def sample_text() -> str:
    """The text of `SampleSource`, to try a model on a book if no other is named."""
    return next(SampleSource().documents()).data.decode()


def open_text(path: str | None, key: str = "--text") -> Source:
    """The text at ``path``, which the setting ``key`` names, or the sample novel if there is no path."""
    return SampleSource() if path is None else TextSource([path], key=key)


class TextSource(Source):
    """Text from files or folders (recursive), in the order of the paths.

    A ``.json``, ``.jsonl`` or ``.ndjson`` file holds one document a line, or one array of documents. Each
    document is a string, or an object with the text in the field ``text_field``. Any other file is one
    document of UTF-8 text. Each file may be compressed as ``.xz``, ``.zst``, ``.gz`` or ``.bz2``; suffixes
    may be in upper case. Links to files and folders are followed, and each folder is read once. Hidden files
    are left out, and every file under ``exclude``. The held-out split hashes the text itself. So a document
    keeps its side when files are renamed or re-sharded, and copies of a document are on one side.

    Args:
        key: the setting that names the paths, for errors.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        text_field: str = "text",
        exclude: Iterable[str | Path] = (),
        key: str = "path",
    ):
        left_out = {path.resolve() for _, path in _expand(exclude, key)}
        self._text_field, paths = text_field, list(paths)
        self._files = [(name, path) for name, path in _expand(paths, key) if path.resolve() not in left_out]
        if not self._files:
            raise DataError(
                f"{key}: every file under {', '.join(map(str, paths))} is held out"
                if left_out
                else f"{key}: {', '.join(map(str, paths))} holds no file that is not hidden"
            )

    @functools.cached_property
    def identity(self) -> str:
        """A SHA-256 of the files' own bytes, because hashing a compressed corpus is fast."""
        digest = hashlib.sha256(b"text")
        for _, path in self._files:
            form = f"jsonl {self._text_field}" if is_json(path) else "plain"
            digest.update(f"{len(form)} {form} {path.suffix}".encode())
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Gives the documents that are not blank."""
        for name, path in self._files:
            with open_plain(path) as stream:
                if is_json(path):
                    texts = (
                        (f"{name}:{place.rpartition(':')[2]}", text_of(record, self._text_field, place))
                        for place, record in json_records(stream, path, self._text_field)
                    )
                    # Half of a surrogate pair is not a character, and UTF-8 cannot hold it.
                    texts = ((document, text.encode(errors="replace")) for document, text in texts)
                else:
                    texts = ((name, check_text(text, str(path))) for text in [stream.read()])
                for document, data in texts:
                    if data.strip():
                        yield Document(document, data, data)


def _expand(paths: Iterable[str | Path], key: str) -> list[tuple[str, Path]]:
    """(name, path) of every file under ``paths``; names are relative to the path given."""
    files = []
    for given in (Path(path).expanduser() for path in paths):
        start = given if given.is_dir() else given.parent
        files += sorted((path.relative_to(start).as_posix(), path) for path in _files_of(given, key, set()))
    return files


def _files_of(path: Path, key: str, read: set[Path]) -> Iterator[Path]:
    """The file at ``path``, or every file under a folder that is not hidden. Links are followed. Folders in
    ``read`` are left out and the others are added, so that cycles of links end."""
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise DataError(
            f"{key}: {path} does not exist or is a link to nothing; relative paths start at {Path.cwd()}"
        )
    elif (folder := path.resolve()) not in read:
        read.add(folder)
        for inner in sorted(path.iterdir()):
            if not inner.name.startswith("."):
                yield from _files_of(inner, key, read)


@usage_errors()
def check_length(path: str | None, least: int, key: str = "--text") -> None:
    """Checks that the text at ``path``, if one is given, has ``least`` bytes: no text has more tokens."""
    documents = TextSource([path], key=key).documents() if path else ()
    if path and not any(size >= least for size in accumulate(len(one.data) for one in documents)):
        raise DataError(
            f"{key}: {path} is empty or too short: a sequence of {least:,} tokens takes {least:,} bytes of "
            "text or more; name a longer text, or a shorter length"
        )
