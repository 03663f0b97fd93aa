"""The only module that decides which files are up to date, by content, from small JSON files.

Weights are up to date if ``run.json`` beside them has the run's settings. A record is up to date if
``settings.json`` beside it has its hash, the suite's present settings, and the hash of the weights, if there
are any. File dates are ignored, because a checkout sets them in any order. A new comment, or another run in
the grid, invalidates no weights or records.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..common import files
from ..common.artifacts import changed_inputs, is_intact
from ..common.digests import hash_json
from ..common.files import read_json
from .errors import RecordError
from .paper import NO_RUN, RESULTS, Metric, Suite
from .run import Run

MAKE = Path(".make")
PROOFS = "settings.json"  # beside the records


def has_weights(run: Run) -> bool:
    """Whether finished weights with these settings exist, according to the JSON files.

    Ready weights have no recorded settings; they only need to exist.
    """
    if run.weights is not None:
        return run.weights_file.is_file()
    settings = read_json(run.folder / "run.json").get("settings")
    return run.weights_file.is_file() and bool(done(run)) and not differences(settings, run)


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of the record at ``path``, from ``settings.json`` beside it; empty if it has none."""
    content = _read_settings(path.with_name(PROOFS))
    record = content.get("records", {}).get(path.name)
    if not record:
        return {}
    if content.get("folder") != _folder(path) or not is_intact(path, record):
        raise RecordError(
            f"{path} is not the file of {record.get('rows')} rows that was measured: it was truncated, "
            "edited or copied here; restore it, or delete it to measure again"
        )
    return record | {"inputs": {name: record.get(name) for name in ("settings", "weights")}}


def is_current(suite: Suite, run: Run | None, metric: Metric) -> bool:
    """Whether a record is up to date; missing weights do not invalidate it. ``run`` is None for a metric of
    the whole suite, which has no settings."""
    path = metric.path(suite.name, NO_RUN if run is None else run.name)
    if not path.is_file() or not (found := manifest(path)):
        return False
    if run is None:
        return True
    recorded = recorded_settings(run)
    inputs = found["inputs"] | {"settings": _digest(recorded)}
    if not metric.untrained(run) and (weights := done(run).get("sha256")):
        inputs["weights"] = weights
    return _has_settings(recorded, suite, run) and not changed_inputs(found, inputs)


def is_lost(run: Run, metric: Metric) -> bool:
    """Whether a measured run lacks both a record and the weights to measure it."""
    there = metric.path(run.suite, run.name).is_file() or run.weights_file.is_file()
    return not there and settings_path(run).is_file()


def _has_settings(recorded: Mapping[str, Any], suite: Suite, run: Run) -> bool:
    """Whether recorded settings are those of the run and of the suite's measures now."""
    pairs = (("run", run), ("measure", suite.measure_settings))
    return not any(differences(recorded.get(key), of) for key, of in pairs)


def _digest(recorded: Mapping[str, Any]) -> str:
    return hash_json([recorded.get("run"), recorded.get("measure")])


def differences(before: Any, settings: Any) -> list[str]:
    """The differences between recorded settings and those of a run or of the measures now, a line each.

    A key that is new counts as its default, and a key that no longer exists is ignored, because the key is
    now a constant.
    """
    return list(_differences(before, _settings(settings), settings))


def _differences(before: Any, now: Any, of: Any, where: str = "") -> Iterator[str]:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield f"{where}: {before!r}, now {now!r}"
        return
    keys = {*now} if dataclasses.is_dataclass(of) else {*before, *now}
    for key in sorted(keys):
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
    """``results/SUITE/RUN/settings.json``: the settings of the records beside it, and a proof of each."""
    return RESULTS / run.suite / run.name / PROOFS


def recorded_settings(run: Run) -> dict[str, Any]:
    """The content of ``settings.json``; empty if there is none."""
    return _read_settings(settings_path(run))


def _read_settings(path: Path) -> dict[str, Any]:
    content = read_json(path)
    records, trained = content.get("records", {}), content.get("trained") or {}
    if isinstance(records, dict) and all(isinstance(entry, dict) for entry in (trained, *records.values())):
        return content
    raise RecordError(f"{path} is damaged; restore it, or delete it to measure its records again")


def write_record(
    path: Path,
    content: bytes,
    rows: int,
    measured: tuple[Suite, Run, Metric] | None = None,
    seconds: float | None = None,
) -> Path:
    """Writes a record and its proof. A record interrupted before its proof is written is measured again.
    ``measured`` is None for a metric of the whole suite, which has no settings."""
    proofs = path.with_name(PROOFS)
    state = _read_settings(proofs) | {"folder": _folder(path)}
    records = state.pop("records", {})
    if records.pop(path.name, None):
        files.write_json(proofs, state | {"records": records})
    files.write_bytes(path, content)
    record = {"rows": rows, "sha256": hashlib.sha256(content).hexdigest()}
    if measured is not None:
        suite, run, metric = measured
        state["trained"] = _training_facts(run)
        if not _has_settings(state, suite, run):
            state |= {"run": _settings(run), "measure": _settings(suite.measure_settings)}
        weights = None if metric.untrained(run) else done(run).get("sha256")
        record |= {"settings": _digest(state), "weights": weights, "seconds": seconds}
    records[path.name] = {key: value for key, value in record.items() if value is not None}
    files.write_json(proofs, state | {"records": records})
    return path


def _folder(path: Path) -> str:
    """The folder SUITE/RUN of a record."""
    return "/".join(path.parts[-3:-1])


def done(run: Run) -> dict[str, Any]:
    """The content of ``done.json`` of finished weights; empty if there are none."""
    return read_json(run.folder / "done.json")


def _settings(of: Any) -> dict[str, Any]:
    """Returns the settings of a run or of the measures after a round trip through JSON.

    Fields declared with ``compare=False`` only select a run and are left out.
    """
    compared = [field.name for field in dataclasses.fields(of) if field.compare]
    settings = of.as_dict() if isinstance(of, Run) else {name: getattr(of, name) for name in compared}
    return json.loads(json.dumps(settings, default=dict))


@contextlib.contextmanager
def exclusive(name: str, words: str) -> Iterator[None]:
    """Locks this folder for one process; other processes wait and print a message with the reason."""
    path = MAKE / f"{name}.lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.lock(path, refuse="busy"))
        except files.Locked:
            print(f"waiting: another process {words}", flush=True)
            stack.enter_context(files.lock(path))
        yield


def _training_facts(run: Run) -> dict[str, Any] | None:
    """The cost of a finished run: total GPU seconds, and peak memory of one GPU. Read from the run's folder,
    or else from ``settings.json``; None if unknown."""
    description, finished = read_json(run.folder / "run.json"), done(run)
    if description and finished:
        taken = {name: finished.get(name) for name in ("gpu_seconds", "ranks", "peak_memory_bytes")}
        return taken | {"device": description["device"]}
    recorded = recorded_settings(run)
    return None if differences(recorded.get("run"), run) else recorded.get("trained")
