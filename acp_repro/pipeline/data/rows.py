"""Records of files, one mapping of fields each: JSON lines, and CSV with a header."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import DataError, checked_text, is_tar, json_lines, open_plain, tar_texts


def read_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of each record of a file, in its order; the place is for messages.

    Args:
        path: CSV with a header if the name, without a compression suffix, ends in ``.csv``, and JSON lines
            otherwise. Plain, or as .xz, .zst, .gz or .bz2. Values of CSV are text.

    Raises:
        DataError: there is no such file, or it has another layout.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"path: {path} is no file; relative paths start at {Path.cwd()}")
    with open_plain(path) as (stream, _):
        yield from _csv(path, stream) if ".csv" in path.suffixes[-2:] else json_lines(stream, str(path))


def _csv(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # a text may be longer than the 128 kB that are allowed otherwise
    lines = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    try:
        for row in lines:
            if None in row or None in row.values():
                columns = ", ".join(lines.fieldnames or ())
                raise DataError(
                    f"{path}:{lines.line_num}: a row without the columns {columns}; add or quote its fields"
                )
            yield f"{path}:{lines.line_num}", row
    except UnicodeDecodeError as error:  # its line is not known, because text is decoded ahead of the rows
        byte = error.object[error.start]
        raise DataError(f"{path}: byte 0x{byte:02x} is not UTF-8; convert the file to UTF-8") from None
    except csv.Error as error:
        line = lines.line_num + 1  # where the row begins; an open quote swallows all lines after it
        raise DataError(
            f"{path}:{line}: not valid CSV ({error}); close each quote, and double those within a field"
        ) from None


def members(path: str | Path, *endings: str) -> list[bytes]:
    """The texts of the files with these endings, one each, in a folder or an archive (``.tar``, also
    compressed).

    Raises:
        DataError: there is no such folder or archive; or a file is missing, there twice, or not text.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(p for p in place.rglob("*") if p.is_file() and p.name[0] != ".")
        content = {p.as_posix(): checked_text(p.read_bytes(), str(p)) for p in files}
    elif place.is_file() and is_tar(place):
        with open_plain(place) as (stream, _):
            content = dict(tar_texts(stream, place))
    else:
        raise DataError(f"path: {path} is no folder and no .tar; relative paths start at {Path.cwd()}")
    found = [[text for name, text in content.items() if name.endswith(ending)] for ending in endings]
    for ending, texts in zip(endings, found, strict=True):
        if len(texts) != 1:
            raise DataError(f"path: {path} has {len(texts)} files called *{ending}; one is needed")
    return [text for (text,) in found]
