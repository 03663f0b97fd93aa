"""Where the texts come from: the standard library's own text, files on disk, or a function that gives rows.

A source gives texts in a fixed order: as `Document` for readers of text alone, and as `Row` with all that is
known of them. Its ``identity`` is a SHA-256 that changes if, and only if, the text changes. Nothing here
imports torch or numpy.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.resources
import lzma
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from acp_repro.pipeline.data.files import (
    DataError,
    checked_text,
    is_binary,
    is_jsonl,
    is_tar,
    json_lines,
    open_plain,
    tar_texts,
    text_of,
)


class Row(NamedTuple):
    """One text of a corpus, with what is known of it.

    Attributes:
        text: the text itself.
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
    """One text. ``data`` is valid, non-blank UTF-8."""

    name: str
    data: bytes
    split_key: bytes  # the held-out split hashes it, see `is_heldout`


def is_heldout(document: Document, fraction: float) -> bool:
    """Whether a document belongs to the held-out split of size ``fraction`` (0 to 1).

    The document's own hash decides, so adding documents moves no other document.
    """
    digest = hashlib.sha256(document.split_key).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _ignore(_: int) -> None:
    pass


class Source:
    """The interface of every corpus.

    Attributes:
        identity: a SHA-256 that stands for the text.
        size: bytes, for a progress bar.
        skipped: names of files that were left out.
    """

    identity: str
    size: int
    skipped: Sequence[str] = ()

    def documents(self, advance: Callable[[int], object] = _ignore) -> Iterator[Document]:
        """Gives the documents; ``advance`` is called with the bytes read since its last call."""
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

    def documents(self, advance: Callable[[int], object] = _ignore) -> Iterator[Document]:
        """Gives the documents. Rows in sequence with the same text and different questions are one
        document."""
        before = None
        for number, row in enumerate(self.rows(), 1):
            # Half of a surrogate pair is not a character, and UTF-8 cannot hold it.
            data = row.text.encode(errors="replace")
            if data.strip() and data != before:
                yield Document(f"{self._name}:{number}", data, row.group.encode() or data)
                advance(len(data))
            before = data

    @functools.cached_property
    def _facts(self) -> tuple[str, int]:
        digest, size = hashlib.sha256(b"rows"), 0
        for document in self.documents():
            digest.update(b"%d %d " % (len(document.split_key), len(document.data)))
            digest.update(document.split_key + document.data)
            size += len(document.data)
        return digest.hexdigest(), size

    @property
    def identity(self) -> str:
        return self._facts[0]

    @property
    def size(self) -> int:
        return self._facts[1]


# ---- the standard library ------------------------------------------------------------------

# Test suites are mostly data and repetition, and often not installed. `encodings` is a hundred near-copies of
# one generated character table. `pydoc_data` is read below, topic by topic.
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
        topics: maps a topic to its text (default: ``pydoc_data.topics``).
    """

    def __init__(self, root: Path | None = None, topics: dict[str, str] | None = None):
        root = Path(sysconfig.get_path("stdlib")) if root is None else root
        texts = {name: _read_module(path) for name, path in _stdlib_modules(root)}
        texts |= {f"help/{name}": text for name, text in _help_topics(topics).items()}
        texts = {name: text for name, text in texts.items() if text.strip()}
        if not texts:
            raise DataError(
                f"{root}: no module of the standard library here (stripped to byte code, or in a "
                "zip file?); install a Python with its sources, or use `corpus: text` with a path"
            )
        by_hash = sorted(texts, key=lambda name: (hashlib.sha256(name.encode()).digest(), name))
        self._documents = [Document(name, texts[name].encode(), name.encode()) for name in by_hash]
        self.size = sum(len(d.data) for d in self._documents)
        digest = hashlib.sha256(b"stdlib")
        for document in self._documents:
            digest.update(b"%d %s %d " % (len(document.name), document.split_key, len(document.data)))
            digest.update(document.data)
        self.identity = digest.hexdigest()

    def documents(self, advance: Callable[[int], object] = _ignore) -> Iterator[Document]:
        for document in self._documents:
            yield document
            advance(len(document.data))


def _stdlib_modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        # The list of module names keeps out all else in that folder: site-packages, sitecustomize.py, and the
        # build's own settings (_sysconfigdata, config-3.x).
        if (
            Path(relative.parts[0]).stem in sys.stdlib_module_names
            and not _SKIPPED_FOLDERS.intersection(relative.parts[:-1])
            and relative.as_posix() not in _SKIPPED_FILES
        ):
            yield relative.as_posix(), path


def _read_module(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # follows a coding line; gives "\n" for every line end
            return file.read()
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as Python source ({error}); reinstall Python, or use `corpus: text`"
        ) from error


def _help_topics(topics: dict[str, str] | None) -> dict[str, str]:
    if topics is None:
        try:
            topics = importlib.import_module("pydoc_data.topics").topics
        except ImportError:  # some distributions leave the topics out; the identity shows it
            topics = {}
    return topics


# ---- the sample ----------------------------------------------------------------------------


class SampleSource(Source):
    """One whole book that comes with the package: *Wuthering Heights*, 0.65 MB.

    It is in the books' held-out shard. Of the suites' models only lap-english's was trained on it.
    """

    title = "Wuthering Heights (Emily Brontë, 1847)"

    def __init__(self):
        packed = importlib.resources.files(__package__).joinpath("sample", "wuthering_heights.txt.xz")
        data = lzma.decompress(packed.read_bytes())
        self._document = Document("wuthering_heights.txt", data, data)
        self.size = len(data)
        self.identity = hashlib.sha256(b"sample" + data).hexdigest()

    def documents(self, advance: Callable[[int], object] = _ignore) -> Iterator[Document]:
        """Gives the one document; ``advance`` is called with its bytes."""
        yield self._document
        advance(self.size)


def sample_text() -> str:
    """The text of `SampleSource`, to try a model on a book if no other is named."""
    return next(SampleSource().documents()).data.decode()


# ---- files ---------------------------------------------------------------------------------


class TextSource(Source):
    """Text from a file or a folder (recursive), in the order of the paths.

    A ``.jsonl`` file holds one document a line, in the field ``text_field``. A ``.tar`` archive holds one for
    each text file in it. Any other file is one document of UTF-8 text. Each may be compressed as ``.xz``,
    ``.zst``, ``.gz`` or ``.bz2``. Hidden files are left out, every file under ``exclude``, and files in a
    folder that are not text. The held-out split hashes the text itself. So a document keeps its side when
    files are renamed or re-sharded, and copies of a document are on one side.

    Attributes:
        skipped: names of files that were left out because they hold no text (pictures, for example).

    Raises:
        DataError: a path is missing, or holds no file of text. While documents are read: a bad line, a
            missing field, text that is not UTF-8, a damaged file.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        text_field: str = "text",
        exclude: Iterable[str | Path] = (),
        key: str = "path",
    ):
        left_out = {path.resolve() for _, path in _expand(exclude, key)}
        self._text_field = text_field
        paths = list(paths)
        files = [(name, path) for name, path in _expand(paths, key) if path.resolve() not in left_out]
        named = {Path(path).expanduser() for path in paths}  # a file that is given by name is not skipped
        binary = {path for _, path in files if path not in named and is_binary(path)}
        self.skipped = [name for name, path in files if path in binary]
        self._files = [(name, path) for name, path in files if path not in binary]
        if files and not self._files:
            raise DataError(
                f"{key}: no file under {', '.join(map(str, paths))} is text (there are: "
                f"{', '.join(self.skipped[:3])}); put text or JSON lines (.jsonl) there"
            )
        if not self._files:
            raise DataError(
                f"{key}: every file under {', '.join(map(str, paths))} is held out; "
                "leave at least one for training"
            )
        self.size = sum(path.stat().st_size for _, path in self._files)
        # The files' own bytes stand for the text, because hashing a compressed corpus is fast.
        digest = hashlib.sha256(b"text")
        for _, path in self._files:
            form = f"jsonl {text_field}" if is_jsonl(path) else "tar" if is_tar(path) else "plain"
            digest.update(f"{len(form)} {form} {path.suffix}".encode())
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        self.identity = digest.hexdigest()

    def documents(self, advance: Callable[[int], object] = _ignore) -> Iterator[Document]:
        """Gives the documents; ``advance`` is called with the bytes of file read since its last call."""
        field = self._text_field
        for name, path in self._files:
            done = 0
            with open_plain(path) as (stream, position):
                if is_jsonl(path):
                    texts = (
                        (f"{name}:{place.rpartition(':')[2]}", text_of(record, field, place).encode())
                        for place, record in json_lines(stream, str(path))
                    )
                elif is_tar(path):
                    texts = ((f"{name}:{member}", text) for member, text in tar_texts(stream, path))
                else:
                    texts = ((name, checked_text(text, str(path))) for text in [stream.read()])
                for document_name, data in texts:
                    if data.strip():
                        yield Document(document_name, data, data)
                    advance(position() - done)
                    done = position()


def _expand(paths: Iterable[str | Path], key: str) -> list[tuple[str, Path]]:
    """(name, path) of every file under ``paths``; names are relative to the path given."""
    found = []
    for given in map(Path, paths):
        given = given.expanduser()
        if given.is_file():
            found.append((given.name, given))
        elif given.is_dir():
            below = ((path.relative_to(given), path) for path in given.rglob("*"))
            files = sorted(
                (relative.as_posix(), path)
                for relative, path in below
                if path.is_file() and not any(part.startswith(".") for part in relative.parts)
            )
            if not files:
                raise DataError(
                    f"{key}: {given} is a folder without files; put text (any name) "
                    "or JSON lines (.jsonl) there, plain or as .xz, .zst, .gz, .bz2"
                )
            found += files
        else:
            raise DataError(f"{key}: {given} does not exist; relative paths start at {Path.cwd()}")
    return found
