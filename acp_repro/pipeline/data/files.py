"""Reads text and records from files, also compressed ones; an error names the damaged file in one line."""

import contextlib
import csv
import io
import json
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from acp_repro.common.errors import UserError

_COMPRESSED = {".xz", ".zst", ".gz", ".bz2"}


def default_cache() -> Path:
    """``$ACP_REPRO_CACHE``, or ``cache/`` beside the nearest pyproject.toml, else in the current folder."""
    if given := os.environ.get("ACP_REPRO_CACHE"):
        return Path(given).expanduser()
    here = Path.cwd()
    project = next((p for p in (here, *here.parents) if (p / "pyproject.toml").exists()), here)
    return project / "cache"


class DataError(UserError, ValueError):
    """A corpus or its settings are invalid; the message states the location, the cause and the remedy."""


def ending(path: Path) -> str:
    """The lower-case suffix before any compression suffix: ``.jsonl`` for ``A.JSONL.GZ``."""
    return Path(path.stem if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def is_json(path: Path) -> bool:
    """Whether the file name has a suffix of JSON records: ``.json``, ``.jsonl`` or ``.ndjson``."""
    return ending(path) in {".json", ".jsonl", ".ndjson"}


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Opens ``path`` and decompresses it while it is read; a damaged file raises `DataError`."""
    from fsspec import compression, core  # imported late, so that a command reports it missing in one line

    # .zip is excluded, because it may contain several files.
    name = core.get_compression(path.name, "infer" if path.suffix.lower() in _COMPRESSED else None)
    damage = (EOFError, OSError, lzma.LZMAError, zlib.error, compression.zstd.ZstdError, tarfile.TarError)
    try:
        with open(path, "rb") as raw, compression.compr[name](raw, mode="rb") as stream:
            yield stream
    except damage as error:
        raise DataError(
            f"{path}: cannot be read ({error}); the file is damaged, truncated or protected; copy it again"
        ) from error


def check_text(data: bytes, where: str) -> bytes:
    """``data`` without a byte-order mark; checks that it is text. ``where`` is named in errors."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        data.decode()
        bad = data.find(b"\0")  # valid UTF-8, but only in archives, arrays or images
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        line = data.count(b"\n", 0, bad) + 1
        raise DataError(
            f"{where}:{line}: the byte 0x{data[bad]:02x} is not UTF-8 text; convert the file, or remove it "
            "from the folder"
        )
    return data


def json_records(
    lines: Iterable[bytes], where: str | Path, text_field: str = "text"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of each JSON value: one value per line, or the entries of one array.

    An array begins in the first line and is read into memory completely. The place is ``where`` with the
    number of the line or entry. A string becomes the record ``{text_field: string}``. Blank lines are
    skipped.
    """
    numbered = enumerate(lines, 1)
    for number, line in numbered:
        if line.strip():
            is_array = number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
            content = b"".join([line, *(rest for _, rest in numbered)]) if is_array else line
            try:
                value = json.loads(content.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where}:{number}: not JSON in UTF-8 ({error}); write one object per line, or one array"
                ) from error
            for at, record in enumerate(value, 1) if is_array else [(number, value)]:
                place = f"{where}:{'entry ' if is_array else ''}{at}"
                record = {text_field: record} if isinstance(record, str) else record
                if not isinstance(record, dict):
                    raise DataError(f"{place}: not an object with a text field")
                yield place, record


def field_of(record: dict[str, Any], field: str, where: str) -> Any:
    """The value of a field of a record; ``where`` is named in errors."""
    if field not in record:
        raise DataError(f"{where}: no field {field!r}; this record has: {', '.join(record) or 'none'}")
    return record[field]


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """The text in a field of a record; ``where`` is named in errors."""
    text = field_of(record, field, where)
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {field!r} contains {type(text).__name__}, not text")
    return text


def read_records(path: str | Path, text_field: str = "text") -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of each record of a file: CSV with a header (``.csv``), else `json_records`.

    The file may be compressed as .xz, .zst, .gz or .bz2. CSV values are strings.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"path: {path} is not a file; relative paths start at {Path.cwd()}")
    with open_plain(path) as stream:
        yield from _csv(path, stream) if ending(path) == ".csv" else json_records(stream, path, text_field)


def _csv(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # a text may be longer than the default limit of 128 kB
    lines = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    try:
        for row in lines:
            if None in row or None in row.values():
                raise csv.Error(f"a row without the columns {', '.join(lines.fieldnames or ())}")
            yield f"{path}:{lines.line_num}", row
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}:{lines.line_num}: not valid CSV in UTF-8 ({error})") from error


def read_members(path: str | Path, *endings: str) -> list[bytes]:
    """The content of the single file with each of ``endings`` in a folder or an archive (``.tar``, also
    compressed)."""
    place = Path(path).expanduser()
    if place.is_dir():
        content = {p.as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    elif place.is_file():
        with open_plain(place) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            content = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
    else:
        raise DataError(f"path: {path} is neither a folder nor a .tar; relative paths start at {Path.cwd()}")
    content = {name: text for name, text in content.items() if Path(name).name[0] != "."}
    found = [[(name, text) for name, text in content.items() if name.endswith(end)] for end in endings]
    for ending, texts in zip(endings, found, strict=True):
        if len(texts) != 1:
            raise DataError(f"path: {path} has {len(texts)} files named *{ending}; exactly one is needed")
    return [check_text(text, f"{path}:{name}") for ((name, text),) in found]
