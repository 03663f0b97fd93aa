"""The log of a run."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from ...common import files


class RunLog:
    """``FOLDER/metrics.jsonl``, one JSON object a step, and the same numbers for TensorBoard if requested.

    Lines of steps from ``first_step`` on are dropped first, because they will be written again. A last
    line that a kill cut short is dropped too. JSON has no NaN, so a number that is not finite is written as
    null.

    Args:
        folder: the run's folder; must exist.
        first_step: the next step.
        tensorboard: also write ``FOLDER/tensorboard``; lists and mappings become ``KEY/ENTRY``.

    Raises:
        RuntimeError: TensorBoard is requested and not installed.
    """

    def __init__(self, folder: Path, first_step: int, *, tensorboard: bool = False):
        path = Path(folder) / "metrics.jsonl"
        self._board = _summary_writer(path.parent / "tensorboard", first_step, tensorboard)
        _keep_steps_before(path, first_step)
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Writes one step: ``record["step"]`` is its number, the other values are numbers, lists or
        mappings."""
        self._file.write(json.dumps(_finite_or_null(record), allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(record):
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _summary_writer(folder: Path, first_step: int, wanted: bool):
    if not wanted:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RuntimeError(
            "TensorBoard is not installed; pip install -e '.[tensorboard]', or leave out --tensorboard"
        ) from None
    return SummaryWriter(str(folder), purge_step=first_step)  # hides the steps that will be written again


def _keep_steps_before(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().split("\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
    files.write_text(path, "".join(kept))


def _scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings and lists, with their path as their name."""
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        if isinstance(value, int | float):
            yield name, value
        return
    for key, entry in entries:
        yield from _scalars(entry, f"{name}/{key}" if name else str(key))


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
