"""Atomic files: written under a temporary name, flushed to disk, then renamed. Also JSON, CSV and locks."""

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
    """A temporary path beside ``target``, which is renamed to ``target`` on success and deleted otherwise.

    The folder of ``target`` is created if it does not exist. Readers see the old file or the new one, also
    after a crash or with a full disk. A symbolic link stays a link. An OSError names ``target``.
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
        if number and type(error).__name__ == "SafetensorError":  # it wraps a system error
            code = int(number[1])
            raise OSError(code, os.strerror(code), os.fspath(given)) from error
        if isinstance(error, OSError) and error.errno and error.filename in (None, os.fspath(path)):
            raise OSError(error.errno, error.strerror, os.fspath(given)) from error
        raise
    sync(target.parent)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Writes the file atomically and returns its path."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """:func:`write_bytes` of text in UTF-8, with ``\\n`` as line end on every system."""
    return write_bytes(path, text.encode())


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """:func:`write_text` of indented JSON with a final line end."""
    return write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing, damaged or contains another JSON value."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json_lines(path: str | os.PathLike[str]) -> list[Any]:
    """The values of a JSON Lines file. Only ``\\n`` ends a line, because JSON may contain a raw U+2028."""
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def write_csv(path: str | os.PathLike[str], names: Sequence[str], rows: Iterable[Iterable[Any]]) -> Path:
    """:func:`write_text` of CSV: a header with the column names, then the rows."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    return write_text(path, text.getvalue())


def sync(path: str | os.PathLike[str]) -> None:
    """Calls fsync on a file, or on a folder, which only POSIX systems can open."""
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
    """A context for one process at a time. The lock is released when the process ends, for any reason.

    Args:
        path: the lock file, which is created and never deleted.
        refuse: the message of :class:`Locked`, raised if another process holds the lock. If empty, wait.
    """
    import fcntl  # missing on Windows, which supports only the library

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if refuse else 0))
        except OSError:
            raise Locked(refuse) from None
        yield
