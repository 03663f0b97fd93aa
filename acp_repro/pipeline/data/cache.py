"""A cache entry: an artifact of flat files, such as the token ids of a corpus.

Opening an entry hashes its files: half a second for 100M tokens.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from acp_repro.common import artifacts


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
    """An entry that has been checked, with its manifest: the facts of its builder, ``inputs``, ``sha256``."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest

    def array(self, name: str, dtype: str) -> np.ndarray:
        """The file ``name`` as a read-only, memory-mapped vector (n,) of ``dtype``."""
        path = self.folder / name
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")


def open_or_build(folder: Path, inputs: Mapping[str, Any], build: Callable[[EntryWriter], dict]) -> Entry:
    """The entry at ``folder``, built now if it is missing, damaged or made from other inputs.

    ``build`` writes the files and returns the entry's facts (of JSON's types).
    """

    def write(partial: Path) -> dict[str, Any]:
        with EntryWriter(partial) as writer:
            return build(writer)

    return Entry(folder, artifacts.open_or_build(folder, inputs, write))
