"""A cache entry: a folder of flat files that is either whole and checked, or not there.

It is built under another name, synced to disk and renamed. So a build that is killed leaves no half entry.
``meta.json`` records the SHA-256 of every file, and opening an entry hashes them all: half a second for 100M
tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from acp_repro.common.errors import UserError
from acp_repro.common.files import lock, sha256_of, sync, write_text
from acp_repro.pipeline.data.files import DataError

_log = logging.getLogger(__name__)


def default_cache() -> Path:
    """``$ACP_REPRO_CACHE``, or ``cache/`` beside the nearest pyproject.toml (else here)."""
    if given := os.environ.get("ACP_REPRO_CACHE"):
        return Path(given).expanduser()
    here = Path.cwd()
    project = next((p for p in (here, *here.parents) if (p / "pyproject.toml").exists()), here)
    return project / "cache"


class CorruptEntry(UserError):
    """A cache entry that must be built again; the message says what is wrong with it."""


class EntryWriter:
    """Writes the files of a build: they are appended to, hashed on the way, and synced at the end."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, tuple] = {}
        self._closing = contextlib.ExitStack()

    def append(self, name: str, data: bytes | np.ndarray) -> None:
        """Appends to the file ``name``: bytes, or the elements of an array of any shape and dtype in memory
        order."""
        if name not in self._open:
            path = self._folder / name
            file = self._closing.enter_context(open(path, "wb"))  # noqa: SIM115  see close()
            self._open[name] = (file, hashlib.sha256())
        file, digest = self._open[name]
        data = data.tobytes() if isinstance(data, np.ndarray) else data
        file.write(data)
        digest.update(data)

    def finish(self) -> dict[str, dict]:
        """Syncs and closes every file; gives {name: {sha256}}."""
        record = {}
        for name, (file, digest) in self._open.items():
            file.flush()
            os.fsync(file.fileno())
            record[name] = {"sha256": digest.hexdigest()}
        self.close()
        return record

    def close(self) -> None:
        self._closing.close()


class Entry:
    """An entry that has been checked. ``facts`` is what its builder returned.

    Raises:
        CorruptEntry: it is incomplete, changed, or of another key.
    """

    def __init__(self, folder: Path, key: str):
        self.folder = folder
        try:
            meta = json.loads((folder / "meta.json").read_bytes())
            if meta["key"] != key:
                raise CorruptEntry(f"it was made for the key {meta['key']}, not {key}")
            self.key, self.facts, self.files = key, meta["facts"], meta["files"]
            for name, record in self.files.items():
                if sha256_of(folder / name) != record["sha256"]:
                    raise CorruptEntry(f"the content of {name} has changed")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptEntry(f"a file is missing or damaged ({error})") from error

    def array(self, name: str, dtype: str) -> np.ndarray:
        """The file ``name`` as a read-only, memory-mapped vector (n,) of ``dtype``."""
        path = self.folder / name
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")


def open_or_build(folder: Path, key: str, build: Callable[[EntryWriter], dict]) -> Entry:
    """The entry at ``folder``, built now if it is missing or damaged.

    ``build`` writes the files and returns the entry's facts (of JSON's types). If several processes call at
    once, one builds and the others wait for it.

    Raises:
        DataError: the parent of ``folder`` cannot be used.
    """
    try:
        return _open_or_build(folder, key, build)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder.parent} cannot be used ({error}); point cache_dir or "
            "ACP_REPRO_CACHE to a folder with room that you may write to"
        ) from error


def _open_or_build(folder: Path, key: str, build: Callable[[EntryWriter], dict]) -> Entry:
    with contextlib.suppress(CorruptEntry, FileNotFoundError):
        return _open_existing(folder, key)
    with lock(folder.with_name(folder.name + ".lock")):
        try:
            return _open_existing(folder, key)  # another process may just have made it
        except FileNotFoundError:
            pass
        except CorruptEntry as error:
            _log.warning("the cache entry %s is corrupt: %s; building it again", folder, error)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed build left
        partial.mkdir(parents=True)
        writer = EntryWriter(partial)
        try:
            facts = build(writer)
            _write_meta(partial, key, facts, writer.finish())
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
            sync(folder.parent)
        except BaseException:
            writer.close()
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return Entry(folder, key)


def _open_existing(folder: Path, key: str) -> Entry:
    if not folder.exists():
        raise FileNotFoundError(folder)
    return Entry(folder, key)


def _write_meta(folder: Path, key: str, facts: dict, files: dict) -> None:
    write_text(folder / "meta.json", json.dumps({"key": key, "facts": facts, "files": files}, indent=1))
