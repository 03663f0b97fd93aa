"""A cache entry: a folder of flat files that is either whole and checked, or not there.

It is built under another name, synced to disk and renamed. So a build that is killed leaves no half entry.
``meta.json`` records the SHA-256 of every file, and opening an entry hashes them all: half a second for 100M
tokens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from acp_repro.common.files import lock, sha256_of, sync, write_text

_log = logging.getLogger(__name__)


def default_cache() -> Path:
    """``$ACP_REPRO_CACHE``, or ``cache/`` beside the nearest pyproject.toml (else here)."""
    if given := os.environ.get("ACP_REPRO_CACHE"):
        return Path(given).expanduser()
    here = Path.cwd()
    project = next((p for p in (here, *here.parents) if (p / "pyproject.toml").exists()), here)
    return project / "cache"


class EntryWriter(contextlib.ExitStack):
    """Appends to the files of an entry that is being built."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def append(self, name: str, data: bytes | np.ndarray) -> None:
        """Appends bytes, or the elements of an array in memory order, to the file ``name``."""
        if name not in self._open:
            self._open[name] = self.enter_context((self._folder / name).open("wb"))
        self._open[name].write(data if isinstance(data, bytes) else data.tobytes())


class Entry:
    """An entry that has been checked. ``facts`` is what its builder returned."""

    def __init__(self, folder: Path, meta: dict):
        self.folder, self.key, self.facts, self.files = folder, meta["key"], meta["facts"], meta["files"]

    def array(self, name: str, dtype: str) -> np.ndarray:
        """The file ``name`` as a read-only, memory-mapped vector (n,) of ``dtype``."""
        path = self.folder / name
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")


def open_or_build(folder: Path, key: str, build: Callable[[EntryWriter], dict]) -> Entry:
    """The entry at ``folder``, built now if it is missing or damaged; of several processes one builds it.

    ``build`` writes the files and returns the entry's facts (of JSON's types).
    """
    if entry := _open(folder, key):
        return entry
    with lock(folder.with_name(folder.name + ".lock")):
        if entry := _open(folder, key):  # another process may just have made it
            return entry
        if folder.exists():
            _log.warning("the cache entry %s is corrupt; building it again", folder)
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed build left
        partial.mkdir(parents=True)
        try:
            with EntryWriter(partial) as writer:
                facts = build(writer)
            files = {path.name: {"sha256": sha256_of(path)} for path in sorted(partial.iterdir())}
            for name in files:
                sync(partial / name)
            meta = {"key": key, "facts": facts, "files": files}
            write_text(partial / "meta.json", json.dumps(meta, indent=1))
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return Entry(folder, meta)


def _open(folder: Path, key: str) -> Entry | None:
    """The entry if it is whole, as it was written, and of this key."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        meta = json.loads((folder / "meta.json").read_bytes())
        entry = Entry(folder, meta)
        whole = all(sha256_of(folder / name) == record["sha256"] for name, record in entry.files.items())
        return entry if whole and entry.key == key else None
    return None
