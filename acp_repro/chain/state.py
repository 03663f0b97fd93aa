"""What is up to date: the one test that Make and the measure command share, and what it rests on.

Weights are up to date if their folder says that they are of the run's settings (``training.run_folder``).
A record is up to date if it is not older than the stamps of its settings and than the weights, if it is of
any. A stamp is a small file, ``.make/SUITE/RUN.json`` or ``.make/SUITE/measure.json``, that is written anew
only when its settings change: so adding a run to the grid, or a comment, trains and measures nothing again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import files
from .errors import NameTaken, RecordError
from .paper import RESULTS, Quantity, Suite
from .run import EXPERIMENTS, Run

MAKE = Path(".make")
_LONG_AGO = 86_400.0  # a day after the epoch: Make takes the epoch itself for "does not exist"


def run_stamp(run: Run) -> Path:
    """Changes with the settings of the run."""
    return MAKE / run.suite / f"{run.name}.json"


def measure_stamp(suite: Suite) -> Path:
    """Changes with the settings of the measures."""
    return MAKE / suite.name / "measure.json"


def prerequisites(suite: Suite, run: Run, quantity: Quantity) -> list[Path]:
    """What a record of a run must not be older than."""
    stamps = [run_stamp(run), measure_stamp(suite)]
    return stamps if quantity.untrained(run) else [run.weights_file, *stamps]


def is_current(suite: Suite, run: Run, quantity: Quantity) -> bool:
    """Whether a record need not be measured again. Weights that are gone do not count against it."""
    record = quantity.path(run.suite, run.name)
    if not record.is_file():
        return False
    newest = max(
        (p.stat().st_mtime_ns for p in prerequisites(suite, run, quantity) if p.is_file()), default=0
    )
    return record.stat().st_mtime_ns >= newest


def claim_name(suite: Suite) -> None:
    """Keeps the folders of a suite whose file is not in ``experiments/`` for that file.

    Raises:
        NameTaken: they are another file's, which is still there.
    """
    file, note = suite.path, MAKE / suite.name / "file"
    if file.parent == EXPERIMENTS:
        return
    before = Path(note.read_text()) if note.is_file() else file
    if before.is_file() and not before.samefile(file):
        raise NameTaken(file, before)
    files.write_text(note, str(file.resolve()))


def write_stamps(suite: Suite) -> None:
    """Brings the stamps of all runs and of the measures up to date.

    A stamp that is made for the first time is older than any file, so records that came with a checkout,
    in whatever order, stay up to date; unless ``results/SUITE/RUN/settings.json`` says that they are of
    other settings.
    """
    claim_name(suite)
    all_current = True
    for run in suite.runs:
        recorded = recorded_settings(run)
        of = {"run": run, "measure": suite.measure}
        current = {
            key: recorded is None
            or (_agree(recorded[key], of[key]) and not recorded.get("older", {}).get(key))
            for key in of
        }
        _stamp(run_stamp(run), run, current["run"])
        all_current &= current["measure"]
    _stamp(measure_stamp(suite), suite.measure, all_current)


def of_other_settings(suite: Suite, run: Run, quantity: Quantity) -> bool:
    """Whether a record is known to be of other settings than the suite has now.

    Raises:
        RecordError: see :func:`recorded_settings`.
    """
    recorded = recorded_settings(run)
    if recorded is None:
        return False
    return any(
        not _agree(recorded[key], of) or quantity.name in (recorded.get("older", {}).get(key) or ())
        for key, of in (("run", run), ("measure", suite.measure))
    )


def _stamp(path: Path, of: Any, records_are_current: bool) -> None:
    before, settings = _read(path), _settings(of)
    if before == settings:
        return
    then = path.stat() if path.exists() else None
    files.write_json(path, settings)
    if then is None and records_are_current:
        os.utime(path, (_LONG_AGO, _LONG_AGO))
    elif then is not None and _agree(before, of):
        os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))


def _agree(before: Any, of: Any) -> bool:
    """Whether settings are those of a run or of the measures now, but for keys that there were none of.

    What was made before a key existed is of the key's default, and of no other value.
    """
    if not isinstance(before, dict):
        return False
    now = _settings(of)
    if any(name not in now or now[name] != value for name, value in before.items()):
        return False
    return all(_is_default(of, name) for name in now.keys() - before.keys())


def _is_default(of: Any, name: str) -> bool:
    """Whether a key has the value that it has where nothing names it."""
    for field in dataclasses.fields(of):
        if field.name == name:
            new = field.default_factory
            return getattr(of, name) == (field.default if new is dataclasses.MISSING else new())
    return False


def settings_path(run: Run) -> Path:
    """``results/SUITE/RUN/settings.json``: says whether committed records are of these settings."""
    return RESULTS / run.suite / run.name / "settings.json"


def write_settings(
    suite: Suite, run: Run, quantities: Iterable[Quantity], trained: Mapping[str, Any] | None = None
) -> None:
    """Keeps the settings of a run beside its records, of which ``quantities`` were measured now.

    ``trained`` is what the training took, kept because a plan is checked against it where the run's
    folder is no more.

    Where the settings are no longer those of before, the run's other records are named under ``older``:
    ``run`` if the training is another, else ``measure``, until they too are measured again.
    """
    now = {"run": _settings(run), "measure": _settings(suite.measure)}
    before = recorded_settings(run) or dict(now)
    older = {key: set(names) for key, names in before.pop("older", {}).items()}
    for key, of in (("run", run), ("measure", suite.measure)):
        if not _agree(before[key], of):
            older[key] = {q.name for q in suite.paper.quantities if q.path(run.suite, run.name).exists()}
    measured = {quantity.name for quantity in quantities}
    older = {key: sorted(names - measured) for key, names in older.items()}
    now |= {"older": older} if any(older.values()) else {}
    same = _agree(before["run"], run)  # else it took another training
    if trained := trained or (before.get("trained") if same else None):
        now["trained"] = dict(trained)
    files.write_json(settings_path(run), now)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _settings(of: Any) -> dict[str, Any]:
    """Those of a run, or of the measures."""
    return _as_json(of.as_dict() if isinstance(of, Run) else dataclasses.asdict(of))


def recorded_settings(run: Run) -> dict[str, Any] | None:
    """The settings that the records of a run were made with, where that is known.

    Raises:
        RecordError: its file is damaged.
    """
    path = settings_path(run)
    try:
        recorded = json.loads(path.read_text())
        if not all(isinstance(part, dict) for part in (recorded["run"], recorded["measure"])):
            raise TypeError("run and measure must be objects")
        if not isinstance(recorded.get("older", {}), dict):
            raise TypeError("older must be an object")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path} is damaged ({error}), so nothing says of what settings the records beside it are; put "
            "it back, or delete it to take them for records of the present ones"
        ) from None
    return recorded


def _as_json(value: Any) -> Any:
    """``value`` as it comes back from a JSON file, so that both compare."""
    return json.loads(json.dumps(value, default=dict))


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """One process measures at a time in this folder: times that contend are times of nothing."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.lock(MAKE / "measuring.lock", refuse="busy"))
        except files.Locked:
            print("waiting: another process measures here", flush=True)
            stack.enter_context(files.lock(MAKE / "measuring.lock"))
        yield


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
    recorded = recorded_settings(run)
    same = recorded is not None and _as_json(run.as_dict()) == recorded["run"]
    return MeasuredRun(**recorded["trained"]) if same and "trained" in recorded else None
