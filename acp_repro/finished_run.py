"""What a finished run took, read from its folder or from beside its records. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .records import settings_path
from .suite import Run


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: seconds of all its GPUs, and the most memory that one of them held."""

    gpu_seconds: float
    ranks: int
    peak_memory_bytes: int | None
    device: str


def measured_run(run: Run) -> MeasuredRun | None:
    """What a finished run took, from its folder or else from beside its records; None if not known."""
    try:
        done = json.loads((run.folder / "done.json").read_text())
        description = json.loads((run.folder / "run.json").read_text())
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    except (OSError, ValueError):
        return _recorded_run(run)
    ranks = done.get("ranks", description.get("ranks", 1))
    peaks = [json.loads(line).get("peak_memory_bytes") for line in lines]
    peak = max((p for p in [*peaks, done.get("peak_memory_bytes")] if p), default=None)
    seconds = done.get("gpu_seconds", done["seconds"] * ranks)
    return MeasuredRun(seconds, ranks, peak, description.get("device", "?"))


def _recorded_run(run: Run) -> MeasuredRun | None:
    try:
        recorded = json.loads(settings_path(run).read_text())
    except (OSError, ValueError):
        return None
    same = json.loads(json.dumps(run.as_dict())) == recorded["run"]
    return MeasuredRun(**recorded["trained"]) if same and "trained" in recorded else None
