"""Plain bytes out of a file that may be compressed, with errors that name the file."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from acp_repro.common.errors import UserError

_COMPRESSED = {".xz", ".zst", ".gz"}


class DataError(UserError, ValueError):
    """A corpus or its settings cannot be used; the message says where, why and what to do."""


def is_jsonl(path: Path) -> bool:
    """Whether the name, less a compression suffix, ends in ``.jsonl``."""
    return Path(path.stem if path.suffix in _COMPRESSED else path).suffix == ".jsonl"


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open ``path`` and decompress while reading.

    Gives the stream and a function that says how many bytes of the file itself have been read.
    A damaged or truncated file raises `DataError` inside the ``with``.
    """
    try:
        with open(path, "rb") as raw, contextlib.ExitStack() as stack:
            stream: BinaryIO = raw
            if path.suffix == ".xz":
                stream = stack.enter_context(lzma.open(raw))
            elif path.suffix == ".gz":
                stream = stack.enter_context(gzip.open(raw))
            elif path.suffix == ".zst":
                stream = stack.enter_context(io.BufferedReader(_ZstdReader(raw), 1 << 17))
            yield stream, raw.tell
    except DataError:
        raise
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); the file is damaged, cut short or protected: copy it again"
        ) from error


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a ``.zst`` file.

    The library's own reader takes a file that is cut short for a whole one, and would quietly
    lose its last documents; this one looks whether the last frame was complete.
    """

    def __init__(self, raw: BinaryIO):
        import zstandard  # only those who have such files need it

        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._raw, self._frame, self._ready = raw, None, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if self._frame is not None and self._frame.eof:
                rest, self._frame = self._frame.unused_data, None
            else:
                rest = b""
            rest = rest or self._raw.read(1 << 17)
            if not rest:
                if self._frame is not None:
                    raise EOFError("the compressed data ends in the middle")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._ready = memoryview(self._frame.decompress(rest))
            except self._error as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
