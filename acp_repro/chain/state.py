"""Decides what is up to date, by content, for Make and for the commands. No other module does.

Weights are up to date if ``run.json`` beside them has the run's settings. A record is up to date if
``results/SUITE/RUN/settings.json`` matches the suite's present settings, and the weights that exist, if any.
Dates do not matter, because a checkout may give them in any order. A comment, or another run in the grid,
does not cause a new training or measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import files
from .errors import NameTaken, RecordError
from .paper import RESULTS, Quantity, Suite
from .run import EXPERIMENTS, Run

MAKE = Path(".make")


def has_weights(run: Run) -> bool:
    """Whether the weights exist, finished and with these settings, as far as small files show.

    Ready weights come without settings; they only need to exist.
    """
    if run.weights is not None:
        return run.weights_file.is_file()
    settings = read_json(run.folder / "run.json").get("settings")
    return run.weights_file.is_file() and bool(done(run)) and not differences(settings, run)


def is_current(suite: Suite, run: Run, quantity: Quantity) -> bool:
    """Whether a record need not be measured again. Missing weights do not count against it.

    Raises:
        RecordError: see :func:`recorded_settings`.
    """
    return quantity.path(run.suite, run.name).is_file() and not is_older(suite, run, quantity)


def is_lost(run: Run, quantity: Quantity) -> bool:
    """Whether a measured run lacks a record and the weights to make it from."""
    there = quantity.path(run.suite, run.name).is_file() or run.weights_file.is_file()
    return not there and settings_path(run).is_file()


def claim_name(suite: Suite) -> None:
    """Reserves the folders of a suite whose file is not in ``experiments/`` for that file.

    Raises:
        NameTaken: they belong to another file, which still exists.
    """
    file, note = suite.path, MAKE / suite.name / "file"
    if file.parent == EXPERIMENTS:
        return
    before = Path(note.read_text()) if note.is_file() else file
    if before.is_file() and not before.samefile(file):
        raise NameTaken(file, before)
    files.write_text(note, str(file.resolve()))


def is_older(suite: Suite, run: Run, quantity: Quantity) -> bool:
    """Whether a record is known to have other settings than the suite has now, or other weights than exist
    now.

    Raises:
        RecordError: see :func:`recorded_settings`.
    """
    recorded = recorded_settings(run)
    if recorded is None:
        return False
    return any(
        differences(recorded[key], of) or quantity.name in (recorded.get("older", {}).get(key) or ())
        for key, of in (("run", run), ("measure", suite.measure_settings))
    ) or (not quantity.untrained(run) and _of_other_weights(recorded, run))


def _of_other_weights(recorded: Mapping[str, Any], run: Run) -> bool:
    """Whether the present weights differ from those of the records.

    Older records have no hash of their weights in ``settings.json``. They are compared by the time that the
    training took.
    """
    of = {"sha256": recorded.get("weights"), **recorded.get("trained", {})}
    now = done(run)
    known = [key for key in ("sha256", "gpu_seconds") if of.get(key) and now.get(key)]
    return bool(known) and of[known[0]] != now[known[0]]


def differences(before: Any, of: Any) -> list[str]:
    """The differences between recorded settings and those of a run or of the measures now, a line each.

    A key that did not exist when the record was made counts as its default.
    """
    return list(_differences(before, _settings(of), of))


def _differences(before: Any, now: Any, of: Any, where: str = "") -> Iterator[str]:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield f"{where}: {before!r}, now {now!r}"
        return
    for key in sorted({*before, *now} - {*_which(of)}):
        if key in before or not _is_default(of, key):
            inside = getattr(of, key, None)
            yield from _differences(before.get(key), now.get(key), inside, f"{where}.{key}".lstrip("."))


def _is_default(of: Any, name: str) -> bool:
    """Whether a key has its default value."""
    for field in dataclasses.fields(of) if dataclasses.is_dataclass(of) else ():
        if field.name == name:
            new = field.default_factory
            return getattr(of, name) == (field.default if new is dataclasses.MISSING else new())
    return False


def settings_path(run: Run) -> Path:
    """``results/SUITE/RUN/settings.json``: the settings of the committed records."""
    return RESULTS / run.suite / run.name / "settings.json"


def write_settings(
    suite: Suite,
    run: Run,
    quantities: Iterable[Quantity],
    trained: Mapping[str, Any] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> None:
    """Writes a run's settings and its weights' hash beside its records; ``quantities`` were measured now.

    If settings or weights have changed, the run's other records are listed under ``older`` until they are
    measured again too: under ``run`` if the training changed, else under ``measure``.

    Args:
        trained: what the training took. It is kept so that a plan can be checked without the run's folder.
        seconds: what measuring took, by quantity.
    """
    now = {"run": _settings(run), "measure": _settings(suite.measure_settings)}
    before = recorded_settings(run) or dict(now)
    older = {key: set(names) for key, names in before.pop("older", {}).items()}
    there = [q for q in suite.paper.quantities if q.path(run.suite, run.name).exists()]
    if _of_other_weights(before, run):
        older.setdefault("run", set()).update(q.name for q in there if not q.untrained(run))
    for key, of in (("run", run), ("measure", suite.measure_settings)):
        if differences(before[key], of):
            older[key] = {q.name for q in there}
    measured = {quantity.name for quantity in quantities}
    older = {key: sorted(names - measured) for key, names in older.items()}
    now |= {"older": older} if any(older.values()) else {}
    same = not differences(before["run"], run)  # else it came from another training
    if trained := trained or (before.get("trained") if same else None):
        now["trained"] = dict(trained)
    if weights := done(run).get("sha256") or before.get("weights"):
        now["weights"] = weights
    if took := before.get("seconds", {}) | dict(seconds or {}):
        now["seconds"] = took
    files.write_json(settings_path(run), now)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is damaged or missing."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def done(run: Run) -> dict[str, Any]:
    """The content of ``done.json`` of finished weights; empty if there are none."""
    return read_json(run.folder / "done.json")


def _settings(of: Any) -> dict[str, Any]:
    """The settings of a run, or of the measures, as a JSON file gives them back."""
    settings = of.as_dict() if isinstance(of, Run) else dataclasses.asdict(of)
    return json.loads(json.dumps(settings, default=dict))


def _which(of: Any) -> tuple[str, ...]:
    """Keys that say which run is measured. They change no record, so no record is old for them."""
    return getattr(of, "WHICH", ())


def recorded_settings(run: Run) -> dict[str, Any] | None:
    """The settings that the records of a run were made with, if known.

    Raises:
        RecordError: the file is damaged.
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
            f"{path} is damaged ({error}), so the settings of the records beside it are unknown; put "
            "it back, or delete it to treat them as records of the present settings"
        ) from None
    return recorded


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """One process measures at a time in this folder, because measures at the same time would spoil
    timings."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.lock(MAKE / "measuring.lock", refuse="busy"))
        except files.Locked:
            print("waiting: another process measures here", flush=True)
            stack.enter_context(files.lock(MAKE / "measuring.lock"))
        yield


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: the seconds of all its GPUs, and the most memory that one of them held."""

    gpu_seconds: float
    ranks: int
    peak_memory_bytes: int | None
    device: str


def measured_run(run: Run) -> MeasuredRun | None:
    """What a finished run took, from its folder or else from beside its records; None if unknown."""
    try:
        done = json.loads((run.folder / "done.json").read_text())
        description = json.loads((run.folder / "run.json").read_text())
        lines = files.read_json_lines(run.folder / "metrics.jsonl")
    except (OSError, ValueError):
        return _recorded_run(run)
    ranks = done.get("ranks", description.get("ranks", 1))
    peaks = [line.get("peak_memory_bytes") for line in lines]
    peak = max((p for p in [*peaks, done.get("peak_memory_bytes")] if p), default=None)
    seconds = done.get("gpu_seconds", done["seconds"] * ranks)
    return MeasuredRun(seconds, ranks, peak, description.get("device", "?"))


def read_log(quantity: str, run: Run) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl.

    Raises:
        RecordError: there is none, or it cannot be read; the message names the quantity and the command that
            trains.
    """
    path = run.folder / "metrics.jsonl"
    try:
        return files.read_json_lines(path)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{quantity}: {path} cannot be read ({error}); train with `{run.command}`"
        ) from None


def _recorded_run(run: Run) -> MeasuredRun | None:
    recorded = recorded_settings(run)
    same = recorded is not None and not differences(recorded["run"], run)
    return MeasuredRun(**recorded["trained"]) if same and "trained" in recorded else None
