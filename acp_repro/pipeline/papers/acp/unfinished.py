"""Partial results of a long measurement, so that it can be stopped and continued."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acp_repro.common import files


def identity(model: Any, weights_sha256: str | None) -> dict[str, Any]:
    """The key of a model, for results that are kept: the same weights with another config are another
    model."""
    return {"weights": weights_sha256, "config": dataclasses.asdict(model.config)}


def digest(key: Any) -> str:
    """A short name of a value of JSON's types."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


class Unfinished:
    """Rows by name in a file of JSON lines. The first line is the key of the rows.

    A file with another key, or that is not text, is started again. A last line that a kill cut short is left
    out.

    Args:
        path: the file; its folder is created. None keeps everything in memory.
        key: of JSON's types: all that decides the rows.
    """

    def __init__(self, path: Path | None, key: dict[str, Any]):
        self._path, self._rows = path, {}
        if path is None:
            return
        first = json.dumps({"key": key}, sort_keys=True)
        there = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        lines = there.split("\n")
        whole = [first]
        if lines[:1] == [first]:
            for line in lines[1:]:
                try:
                    name, rows = json.loads(line)
                except ValueError:
                    break
                self._rows[name] = rows
                whole.append(line)
        files.write_text(path, "\n".join(whole) + "\n")

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> list[Any]:
        return self._rows[name]

    def add(self, found: Mapping[str, list[Any]]) -> None:
        """Keeps the rows of some names."""
        self._rows.update(found)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps([name, rows]) + "\n" for name, rows in found.items())

    def finish(self) -> None:
        """Deletes the file when all is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
