"""The only reader and writer of records: measured values as tidy CSV with their whole provenance.

Missing values are preserved. This module needs no torch, so that `analysis` can read records without it.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import files
from . import freshness
from .errors import RecordError
from .paper import NO_RUN, RESULTS, Metric, Paper, Suite
from .provenance import origin
from .run import Run

if TYPE_CHECKING:
    import pandas


def write_records(
    suite: Suite,
    run: Run,
    metric: Metric,
    rows: Iterable[Mapping[str, Any]],
    *,
    device: str,
    dtype: str,
    trained_tokens: int,
    uses_gpu: bool = False,
    seconds: float | None = None,
) -> Path:
    """Writes ``results/SUITE/RUN/METRIC.csv`` whole, with a proof."""
    shared = {
        "suite": run.suite,
        "run": run.name,
        **run.columns(),
        "trained_tokens": trained_tokens,
        **origin(device, dtype, uses_gpu),
    }
    path = metric.path(run.suite, run.name)
    content, count = _content(path, suite.paper, metric, shared, rows)
    return freshness.write_record(path, content, count, (suite, run, metric), seconds)


def write_suite_records(
    suite: str | None,
    paper: Paper,
    metric: Metric,
    rows: Sequence[Mapping[str, Any]],
    *,
    device: str,
    dtype: str,
    uses_gpu: bool = False,
    path: Path | None = None,
) -> Path:
    """Writes ``results/SUITE/benchmark/METRIC.csv``, for a whole suite, or ``path``.

    Existing rows whose ``Metric.key`` differs from that of every new row are kept, before the new rows.
    """
    shared = {"suite": suite, **origin(device, dtype, uses_gpu)}
    key, kept = metric.key, []
    if path is None and key:
        new = {_values(row, key) for row in rows}
        kept = [row for row in benchmark_rows(suite, paper, metric) if _values(row, key) not in new]
    target = path or metric.path(suite)
    content, count = _content(target, paper, metric, shared, rows, kept)
    return files.write_bytes(path, content) if path else freshness.write_record(target, content, count)


def _values(row: Mapping[str, Any], columns: Iterable[str]) -> tuple[str, ...]:
    return tuple("" if row[name] is None else str(row[name]) for name in columns)


def benchmark_rows(suite: str, paper: Paper, metric: Metric) -> list[dict[str, str]]:
    """The rows of ``results/SUITE/benchmark/METRIC.csv``, as text; empty without a file."""
    path = metric.path(suite)
    if not path.is_file():
        return []
    _check_proof(path, "rename the file, and measure again")
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != paper.columns(metric):
            raise RecordError(f"{path} has other columns than this version; rename it, and measure again")
        return list(rows)


def _content(path: Path, paper: Paper, metric: Metric, shared, rows, kept=()) -> tuple[bytes, int]:
    """The content of the file at ``path``, and its number of rows."""
    # A record without a run may fill the columns of a run.
    free = set(paper.run_columns) - set(shared)
    complete = [{**shared, **row} for row in rows]
    assert complete, f"{metric.name}: nothing was measured"
    for row in complete:
        assert row.keys() - shared.keys() - free == set(metric.columns), f"{metric.name}: {row}"
        # NaN in a file would be read as a missing value and silently excluded from means.
        finite = all(math.isfinite(x) for x in row.values() if isinstance(x, Real))
        assert finite, f"{metric.name}: not finite, so nothing is written: {row}"
    text = io.StringIO()
    writer = csv.DictWriter(text, paper.columns(metric), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*kept, *complete])
    content = text.getvalue().encode()
    # Without a time stamp, equal records produce bitwise identical files.
    content = gzip.compress(content, mtime=0) if path.suffix == ".gz" else content
    return content, len(kept) + len(complete)


def read_records(
    suite: Suite, metric: str, runs: Iterable[Run] | None = None, *, partial: bool = False
) -> pandas.DataFrame:
    """The records of a metric in the order of the suite's runs, for ``runs`` or for all runs of the metric.
    ``partial`` leaves out runs without a record; at least one run must have one."""
    import pandas

    kind = suite.paper.metric(metric)
    if kind.command:
        paths = {None: kind.path(suite.name, NO_RUN)}
    else:
        paths = {run: kind.path(suite.name, run.name) for run in (kind.runs(suite) if runs is None else runs)}
    missing = [run for run, path in paths.items() if not path.is_file()]
    if not paths or (missing and not partial) or len(missing) == len(paths):
        which = ", ".join(run.name for run in missing if run is not None)
        raise RecordError(
            f"no records of {metric} in {RESULTS / suite.name}{' for ' + which if which else ''}; make "
            f"them with `{kind.command_for(suite.name, [] if runs is None else filter(None, missing))}`"
        )
    columns, frames = [], []
    for path in (path for run, path in paths.items() if run not in missing):
        otherwise = f"delete it and run `{kind.command_for(suite.name)}`"
        _check_proof(path, otherwise)
        frame = pandas.read_csv(path, dtype={"size": str, "commit": str})
        columns = columns or list(frame.columns)
        if list(frame.columns) != columns:
            raise RecordError(f"{path}: its columns differ from those of the other runs; {otherwise}")
        frames.append(frame.dropna(axis="columns", how="all"))
    return pandas.concat(frames).reindex(columns=columns).reset_index(drop=True)


def _check_proof(path: Path, otherwise: str) -> None:
    if not freshness.manifest(path):
        raise RecordError(
            f"{path} has no entry in {path.with_name(freshness.PROOFS)}, which proves its origin; {otherwise}"
        )
