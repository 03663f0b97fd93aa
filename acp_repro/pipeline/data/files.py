"""Reads bytes and text from a file that may be compressed; errors name the file and the line."""

from __future__ import annotations

import contextlib
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from acp_repro.common.errors import UserError

_COMPRESSED = {".xz", ".zst", ".gz", ".bz2"}
# Characters that a text has only a few of.
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))


class DataError(UserError, ValueError):
    """A corpus or its settings cannot be used; the message says where, why and what to do."""


def is_jsonl(path: Path) -> bool:
    """Whether the name, without a compression suffix, ends in ``.jsonl``."""
    return Path(path.stem if path.suffix in _COMPRESSED else path).suffix == ".jsonl"


def is_tar(path: Path) -> bool:
    """Whether the name, without a compression suffix, ends in ``.tar``."""
    return Path(path.stem if path.suffix in _COMPRESSED else path).suffix == ".tar"


def tar_texts(stream: BinaryIO, path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each text file in an archive, in its order. Hidden files and pictures are left out.

    Raises:
        DataError: the archive is damaged, or a text in it is not UTF-8.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                parts = Path(member.name).parts
                if not member.isfile() or any(part.startswith(".") for part in parts if part != "."):
                    continue
                data = archive.extractfile(member).read()
                if not looks_binary(data[: 1 << 14]):
                    yield member.name, checked_text(data, f"{path}:{member.name}")
    except tarfile.TarError as error:
        raise DataError(f"{path}: is no archive, or a damaged one ({error}); copy it again") from error


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Opens ``path`` and decompresses it while reading.

    Gives the stream and a function that says how many bytes of the file itself have been read.

    Raises:
        DataError: inside the ``with``, if the file is damaged or truncated.
    """
    from fsspec import compression, core  # slow to import

    # Not .zip, which may hold several files.
    name = core.get_compression(path.name, "infer" if path.suffix in _COMPRESSED else None)
    try:
        with open(path, "rb") as raw, compression.compr[name](raw, mode="rb") as stream:
            yield stream, raw.tell
    except (EOFError, OSError, lzma.LZMAError, zlib.error, compression.zstd.ZstdError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); the file is damaged, cut short or protected: copy it again"
        ) from error


def is_binary(path: Path) -> bool:
    """Whether the first bytes, decompressed, are not text, in any 8-bit encoding or UTF-16."""
    if is_jsonl(path) or is_tar(path):
        return False
    try:
        with open_plain(path) as (stream, _):
            start = stream.read(1 << 14)
    except DataError:  # damaged: said when it is read
        return False
    return looks_binary(start)


def looks_binary(start: bytes) -> bool:
    """Whether the beginning of a file is not text, in any 8-bit encoding or UTF-16."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16, which can be converted: said when it is read
        return False
    control = len(start) - len(start.translate(None, _CONTROL))
    return b"\0" in start or control > len(start) / 50


def checked_text(data: bytes, where: str) -> bytes:
    """``data`` without a byte-order mark, after a check that it is text.

    Raises:
        DataError: it is not UTF-8, or holds a zero byte; ``where`` and the line are named.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        data.decode()
        bad = data.find(b"\0")  # valid UTF-8, but no text has it: an archive, an array, an image
        reason = "a zero byte, so this is not text"
    except UnicodeDecodeError as error:
        bad, reason = error.start, f"byte 0x{data[error.start]:02x} is not UTF-8"
    if bad >= 0:
        line = data.count(b"\n", 0, bad) + 1
        raise DataError(
            f"{where}:{line}: {reason}; convert the file to UTF-8 text, or keep it out of the folder"
        )
    return data


def json_lines(lines: Iterable[bytes], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of each line that is not blank; the place is ``where`` and the line's number."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{where}:{number}", json_record(line, f"{where}:{number}")


def json_record(line: bytes, where: str) -> dict[str, Any]:
    """The object in one line of JSON.

    Raises:
        DataError: the line is not UTF-8, not JSON, or not an object.
    """
    try:
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte 0x{line[error.start]:02x} is not UTF-8; convert the file to UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); a .jsonl file "
            "holds one JSON object a line, and other text needs another suffix"
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a JSON {type(record).__name__}, not an object with a field of text; "
            'write {"text": "..."} on each line'
        )
    return record


def field_of(record: dict[str, Any], field: str, where: str, key: str = "") -> Any:
    """The value of a field of a record; ``key`` is the setting that names the field, if one does.

    Raises:
        DataError: the record has no such field.
    """
    if field not in record:
        there = f"this line has: {', '.join(record) or 'none'}"
        advice = f"set {key} to another ({there})" if key else there
        raise DataError(f"{where}: no field {field!r}; {advice}")
    return record[field]


def text_of(record: dict[str, Any], field: str, where: str, key: str = "text_field") -> str:
    """The text in a field of a record.

    Raises:
        DataError: there is no such field, or it does not hold valid text.
    """
    text = field_of(record, field, where, key)
    if not isinstance(text, str):
        raise DataError(
            f"{where}: the field {field!r} holds {type(text).__name__}, not text"
            + (f"; set {key} to the one that holds the text" if key else "")
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as \udXXX
        raise DataError(
            f"{where}: {error.reason} in the field {field!r}; this line's text is not "
            "valid Unicode, repair or drop the line"
        ) from error
    return text
