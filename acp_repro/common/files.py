"""Files that are whole or not there: written under another name, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError


class Locked(UserError, RuntimeError):
    """Another process holds the lock."""


@contextlib.contextmanager
def replacing(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``target`` that gets its name on success and is deleted otherwise.

    The folder of ``target`` is created if it does not exist. No reader, full disk or crash leaves half a
    file. A link stays one. An OSError names the target.
    """
    given, target = Path(target), Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.touch(exist_ok=False)
        yield path
        sync(path)
        os.replace(path, target)
    except BaseException as error:
        path.unlink(missing_ok=True)
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number and type(error).__name__ == "SafetensorError":  # it wraps what the system said
            code = int(number[1])
            raise OSError(code, os.strerror(code), os.fspath(given)) from error
        if isinstance(error, OSError) and error.errno and error.filename in (None, os.fspath(path)):
            raise OSError(error.errno, error.strerror, os.fspath(given)) from error
        raise
    sync(target.parent)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Writes the whole file or none of it; returns its path."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """:func:`write_bytes` of UTF-8, with ``\\n`` at the ends of lines on every system."""
    return write_bytes(path, text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """:func:`write_text` of JSON, indented, with a line end."""
    return write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or damaged, or holds no object."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json_lines(path: str | os.PathLike[str]) -> list[Any]:
    """The values of a file of JSON lines. Only ``\\n`` ends a line: JSON text may hold U+2028 as it is."""
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def write_csv(path: str | os.PathLike[str], names: Sequence[str], rows: Iterable[Iterable[Any]]) -> Path:
    """:func:`write_text` of a CSV: the columns' names, then the rows."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    return write_text(path, text.getvalue())


def sync(path: str | os.PathLike[str]) -> None:
    """fsync of a file's content, or of a folder's entries, which not every system can open."""
    if os.name != "posix" and Path(path).is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The file's SHA-256 as hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: str | os.PathLike[str], *, refuse: str = "") -> Iterator[None]:
    """One process inside at a time. The lock is released when the process ends, for any reason.

    Args:
        path: a file that is created for it, and stays.
        refuse: raise :class:`Locked` with these words if another process is inside; empty waits for it.
    """
    import fcntl  # not on Windows, where the library is enough

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refuse else 0))
        except OSError:
            raise Locked(refuse) from None
        yield
