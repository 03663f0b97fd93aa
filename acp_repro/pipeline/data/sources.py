"""Sources of text: the standard library, files on disk, or a function that yields rows.

A source yields texts in a fixed order: as `Document`, the text alone, or as `Row`, with labels and other
fields. The ``identity`` of a source is a SHA-256 that changes if, and only if, the text changes.
"""

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

SPLITS = ("train", "dev", "test")  # splits of a labelled set


class Row(NamedTuple):
    """One text of a corpus with its labels.

    Attributes:
        label: the name of the class, if the corpus has classes.
        question: a question about the text, or an empty string.
        answer: (start, end) of the answer's characters in ``text``, for a question without classes.
        answers: the texts of all valid answers, for scoring.
        split: ``train``, ``dev`` or ``test``, if the corpus has splits; otherwise a hash determines the
            split.
        group: the document or book of the text. All texts of a group are in one split. If empty, the text is
            a group of its own.
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
    """One text: ``data`` is valid, non-blank UTF-8, and the hash of ``split_key`` determines the split."""

    name: str
    data: bytes
    split_key: bytes


def is_heldout(key: bytes, share: float) -> bool:
    """Whether the hash of ``key`` selects a text for a split of ``share`` (0 to 1) of all texts.

    The texts of a smaller share are a subset of those of a larger share.
    """
    return hash_number(key) < share * 2**64


def cut_tail(document: Document, share: float) -> tuple[Document, Document] | None:
    """A document without its last ``share`` (0 to 1) of bytes, and a document of these bytes; None if either
    would be blank.

    The cut is in the first half of these bytes, at the first end of a paragraph, else of a line or a word,
    else between two characters.
    """
    data = document.data
    start = len(data) - int(len(data) * share)
    while start < len(data) and data[start] & 0xC0 == 0x80:  # inside a UTF-8 character
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
    """The interface of all sources; ``identity`` is a hash of the text."""

    identity: str

    def documents(self) -> Iterator[Document]:
        """Yields the texts alone."""
        raise NotImplementedError

    def rows(self) -> Iterator[Row]:
        """Yields the texts with labels and other fields."""
        for document in self.documents():
            yield Row(document.data.decode())


class RowSource(Source):
    """The rows that a function yields, the same ones at each call."""

    def __init__(self, name: str, read: Callable[[], Iterable[Row]]):
        self._name, self._read = name, read

    def rows(self) -> Iterator[Row]:
        yield from self._read()

    def documents(self) -> Iterator[Document]:
        """Yields the texts. Consecutive rows with one text and different questions are one document."""
        before = None
        for number, row in enumerate(self.rows(), 1):
            # UTF-8 cannot encode half of a surrogate pair, which is not a character.
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


# Test suites are mostly data and repetition, and often not installed. `encodings` contains a hundred similar
# copies of a generated character table. `pydoc_data` is read topic by topic.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
# Generated tables of code points, with more digits than words.
_SKIPPED_FILES = {"stringprep.py", "html/entities.py", "re/_casefix.py"}


class StdlibSource(Source):
    """The source code of the running Python's standard library and the topics of its ``help()``.

    Each module and each help topic is one document. Line ends are normalised, so the bytes depend only on the
    Python version. A distribution that patches or splits the library, such as Debian's, has other bytes and
    another identity. Documents are ordered by a hash of their name, so any prefix is a fair sample. Held-out
    documents are selected by name, so the selection is stable over Python versions.

    Args:
        root: the folder of the library (default: the running interpreter's).
        topics: maps topics to texts (default: ``pydoc_data.topics``, if the distribution includes them).
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
        assert texts, f"{root}: this Python does not include the source code of its standard library"
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
    # The list of module names excludes the rest of the folder: site-packages, sitecustomize.py, and build
    # settings (_sysconfigdata, config-3.x).
    for top in (path for path in root.iterdir() if path.stem in sys.stdlib_module_names):
        for path in [top] if top.suffix == ".py" else top.rglob("*.py"):
            name = path.relative_to(root).as_posix()
            if not _SKIPPED_FOLDERS.intersection(name.split("/")[:-1]) and name not in _SKIPPED_FILES:
                yield name, path


def _read_module(path: Path) -> str:
    with tokenize.open(path) as file:  # obeys a coding line; normalises line ends to "\n"
        return file.read()


class SampleSource(Source):
    """A complete book that the package includes: *Wuthering Heights*, 0.65 MB.

    The book is in the held-out shard of the books. Among all suites, only models of lap-english were trained
    on it.
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
    """The text of `SampleSource`, the default text for trying a model."""
    return next(SampleSource().documents()).data.decode()


def open_text(path: str | None, key: str = "--text") -> Source:
    """The text at ``path``, the value of setting ``key``, or the sample novel without a path."""
    return SampleSource() if path is None else TextSource([path], key=key)


class TextSource(Source):
    """Text from files or folders (recursive), in the order of the paths.

    A ``.json``, ``.jsonl`` or ``.ndjson`` file contains one document per line, or one array of documents.
    Each document is a string, or an object with the text in the field ``text_field``. Any other file is one
    document of UTF-8 text. Files may be compressed as ``.xz``, ``.zst``, ``.gz`` or ``.bz2``; suffixes may be
    in upper case. Links to files and folders are followed, and each folder is read once. Hidden files and
    files under ``exclude`` are skipped. The hash of the text determines the split. A document therefore
    remains in its split when files are renamed or re-sharded, and copies of a document are in one split.

    Args:
        key: the setting with the paths, which errors name.
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
                else f"{key}: {', '.join(map(str, paths))} contains no file, or only hidden ones"
            )

    @functools.cached_property
    def identity(self) -> str:
        """A SHA-256 of the bytes of the files, without decompression, which is fast."""
        digest = hashlib.sha256(b"text")
        for _, path in self._files:
            form = f"jsonl {self._text_field}" if is_json(path) else "plain"
            digest.update(f"{len(form)} {form} {path.suffix}".encode())
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields the documents that are not blank."""
        for name, path in self._files:
            with open_plain(path) as stream:
                if is_json(path):
                    texts = (
                        (f"{name}:{place.rpartition(':')[2]}", text_of(record, self._text_field, place))
                        for place, record in json_records(stream, path, self._text_field)
                    )
                    # UTF-8 cannot encode half of a surrogate pair, which is not a character.
                    texts = ((document, text.encode(errors="replace")) for document, text in texts)
                else:
                    texts = ((name, check_text(text, str(path))) for text in [stream.read()])
                for document, data in texts:
                    if data.strip():
                        yield Document(document, data, data)


def _expand(paths: Iterable[str | Path], key: str) -> list[tuple[str, Path]]:
    """(name, path) of every file under ``paths``; names are relative to the given path."""
    files = []
    for given in (Path(path).expanduser() for path in paths):
        start = given if given.is_dir() else given.parent
        files += sorted((path.relative_to(start).as_posix(), path) for path in _files_of(given, key, set()))
    return files


def _files_of(path: Path, key: str, read: set[Path]) -> Iterator[Path]:
    """The file at ``path``, or all files that are not hidden under a folder. Links are followed. Folders in
    ``read`` are skipped, and new folders are added to it, so that cycles of links end."""
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise DataError(
            f"{key}: {path} does not exist or is a broken link; relative paths start at {Path.cwd()}"
        )
    elif (folder := path.resolve()) not in read:
        read.add(folder)
        for inner in sorted(path.iterdir()):
            if not inner.name.startswith("."):
                yield from _files_of(inner, key, read)


@usage_errors()
def check_length(path: str | None, least: int, key: str = "--text") -> None:
    """Checks that the text at ``path``, if given, has ``least`` bytes: no text has more tokens than bytes."""
    documents = TextSource([path], key=key).documents() if path else ()
    if path and not any(size >= least for size in accumulate(len(one.data) for one in documents)):
        raise DataError(
            f"{key}: {path} is empty or too short: a sequence of {least:,} tokens needs {least:,} bytes of "
            "text or more; use a longer text, or a shorter length"
        )
