"""Files of records, one mapping of fields each: JSON lines, and CSV with a header."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import DataError, open_plain


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in its order.

    Args:
        path: CSV with a header where the name, less a compression suffix, ends in ``.csv``, and JSON lines
            otherwise; as it is, or as .xz, .zst or .gz. Values of CSV are text.

    Raises:
        DataError: there is no such file, or it is not of that layout.
    """
    if not path.is_file():
        raise DataError(f"{path} is no file; relative paths start at {Path.cwd()}")
    with open_plain(path) as (stream, _):
        yield from _csv(path, stream) if ".csv" in path.suffixes[-2:] else _json_lines(path, stream)


def _csv(path: Path, stream: io.BufferedIOBase) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # a text may be longer than the 128 kB that are allowed otherwise
    lines = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
    try:
        for row in lines:
            if None in row or None in row.values():
                columns = ", ".join(lines.fieldnames or ())
                raise DataError(f"{path}:{lines.line_num}: a row that does not have the columns {columns}")
            yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}:{lines.line_num}: no CSV in UTF-8 ({error})") from None


def _json_lines(path: Path, stream: io.BufferedIOBase) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(stream, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: no JSON ({error}); give one record a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: a record must be a mapping of fields")
        yield record
