"""Records: what a measure found, as tidy CSV with its whole provenance. The only reader and writer.

    runs/SUITE/RUN  ->  results/SUITE/RUN/QUANTITY.csv  ->  figures/SUITE/...

Every row carries where it comes from, and every measured column names its unit. A value that is
missing stays missing; nothing is filled in. This module needs no torch, so that `analysis` can read
records on a machine that has none.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from .suite import MeasureConfig, Run

RESULTS = Path("results")

# Columns of every record: what was run, then on what.
_RUN_COLUMNS = (
    "suite",
    "run",
    "architecture",
    "size",
    "context_length_tokens",
    "log_pruning_tolerance",
    "seed",
    "trained_tokens",
)
_ORIGIN_COLUMNS = (
    "origin",
    "device",
    "dtype",
    "torch_version",
    "triton_version",
    "ptxas_version",
    "python_version",
    "commit",
)

# The measured columns of each quantity. A unit ends the name; counts, ratios and indices name
# themselves. "decay" is c of Section 2; masses are sums of attention weights, between 0 and 1.
QUANTITIES: dict[str, tuple[str, ...]] = {
    "pruned_ratio": (
        "layer",
        "head",
        "measured_tokens",
        "block_q_tokens",
        "block_k_tokens",
        "pruned_blocks",
        "causal_blocks",
        "pruned_ratio",
    ),
    "attention_time": (
        "implementation",
        "method",
        "measured_tokens",
        "repeats",
        "forward_ms",
        "backward_ms",
        "boundary_search_ms",
    ),
    "throughput": ("implementation", "method", "measured_tokens", "repeats", "throughput_tokens_per_s"),
    "loss_curve": ("position", "window_tokens", "measured_tokens", "loss_nats"),
    "loss": ("measured_tokens", "loss_nats"),
    "decay": (
        "layer",
        "head",
        "pruned_ratio",
        "position",
        "cumulative_log_fgate_nats",
        "threshold_nats",
        "block_q_tokens",
        "block_k_tokens",
        "first_kept_key_position",
    ),
    "attention_weights": ("layer", "head", "query_position", "key_position", "attention_weight"),
    "epsilon_sweep": (
        "swept_log_pruning_tolerance",
        "block_pruned_ratio",
        "token_pruned_ratio",
        "loss_nats",
        "largest_pruned_mass",
        "measured_tokens",
    ),
    "pruned_mass": (
        "layer",
        "head",
        "measured_rows",
        "rows_with_pruning",
        "threshold_nats",
        "pruned_ratio",
        "largest_pruned_mass",
        "q99_pruned_mass",
        "q90_pruned_mass",
        "median_pruned_mass",
        "threshold_slack_nats",
    ),
    "block_size": ("block_tokens", "measured_tokens", "pruned_ratio"),
    "long_context": ("evaluated_length_tokens", "measured_tokens", "pruned_ratio", "loss_nats"),
}

# Quantities of a suite as a whole, that no run stands behind: the columns of the run are missing.
# "nominal": of the whole causal grid, pruned or not.
SUITE_QUANTITIES: dict[str, tuple[str, ...]] = {
    "kernel_time": (
        "implementation",
        "method",
        "gates",
        "length_tokens",
        "heads",
        "head_dim",
        "measured_tokens",
        "repeats",
        "pruned_ratio",
        "forward_ms",
        "forward_backward_ms",
        "search_ms",
        "nominal_forward_tflop",
        "nominal_forward_backward_tflop",
        "gate_gradient_error",
    )
}
_COMMANDS = {"kernel_time": "python -m acp_repro.benchmark_attention --suite {suite}"}

# Thousands of rows that share one provenance: written gzipped.
_LARGE = {"loss_curve", "decay", "attention_weights"}


class RecordError(RuntimeError):
    """Records are missing or not of the schema; the message names the command that makes them."""


def columns(quantity: str) -> tuple[str, ...]:
    """All columns of a quantity's CSV, in order."""
    return (*_RUN_COLUMNS, *{**QUANTITIES, **SUITE_QUANTITIES}[quantity], *_ORIGIN_COLUMNS)


def command_for(quantity: str, suite: str) -> str:
    """The command that makes the records of a quantity."""
    command = _COMMANDS.get(quantity, f"python -m acp_repro.measure {quantity} --suite {{suite}}")
    return command.format(suite=suite)


def path_of(suite: str, run: str, quantity: str) -> Path:
    """``results/SUITE/RUN/QUANTITY.csv``, or ``.csv.gz`` for the quantities with thousands of rows."""
    return RESULTS / suite / run / f"{quantity}.csv{'.gz' if quantity in _LARGE else ''}"


def write_records(
    run: Run,
    quantity: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    device: str,
    dtype: str,
    trained_tokens: int,
    uses_gpu: bool = False,
) -> Path:
    """Writes ``results/SUITE/RUN/QUANTITY.csv`` whole, or not at all.

    Args:
        rows: measured columns of :data:`QUANTITIES`, all of them in each row.
        device: the name of the processor or accelerator.
        uses_gpu: also record the versions of triton and ptxas that made the kernels.

    Raises:
        RecordError: a row lacks a column or has one too many, or there is no row.
    """
    shared = {
        "suite": run.suite,
        "run": run.name,
        "architecture": run.architecture,
        "size": run.size_name,
        "context_length_tokens": run.context_length,
        "log_pruning_tolerance": run.log_pruning_tolerance,
        "seed": run.seed,
        "trained_tokens": trained_tokens,
        **_origin(device, dtype, uses_gpu),
    }
    path = path_of(run.suite, run.name, quantity)
    return _write(path, quantity, set(QUANTITIES[quantity]), shared, rows)


def settings_text(run: Run, measure: MeasureConfig) -> str:
    """The settings behind the records of a run, as JSON."""
    settings = {"run": run.as_dict(), "measure": dataclasses.asdict(measure)}
    return json.dumps(settings, indent=2, default=dict) + "\n"


def settings_path(run: Run) -> Path:
    """``results/SUITE/RUN/settings.json``: tells Make whether committed records are of these settings."""
    return RESULTS / run.suite / run.name / "settings.json"


def write_settings(
    run: Run, measure: MeasureConfig, quantities: Iterable[str], trained: Mapping[str, Any] | None = None
) -> None:
    """Keeps the settings of a run beside its records, of which ``quantities`` were measured now.

    ``trained`` is what the training took, kept because a plan is checked against it where the run's
    folder is no more.

    Where the settings are no longer those of before, the run's other records are named under ``older``:
    ``run`` if the training is another, else ``measure``, until they too are measured again.
    """
    path, now = settings_path(run), json.loads(settings_text(run, measure))
    before = json.loads(path.read_text()) if path.exists() else now
    older = {key: set(names) for key, names in before.pop("older", {}).items()}
    for key in ("run", "measure"):
        if before[key] != now[key]:
            older[key] = {q for q in QUANTITIES if path_of(run.suite, run.name, q).exists()}
    older = {key: sorted(names - set(quantities)) for key, names in older.items()}
    now |= {"older": older} if any(older.values()) else {}
    if trained := trained or before.get("trained"):
        now["trained"] = dict(trained)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(now, indent=2) + "\n")
    temporary.replace(path)


def write_suite_records(
    suite: str | None,
    quantity: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    device: str,
    dtype: str,
    uses_gpu: bool = False,
    path: Path | None = None,
) -> Path:
    """Writes ``results/SUITE/benchmark/QUANTITY.csv``, of a suite and no run; else :func:`write_records`.

    Args:
        suite: may be None where ``path`` is given.
        path: another file to write.
    """
    shared = {"suite": suite, **_origin(device, dtype, uses_gpu)}
    path = path or path_of(suite, "benchmark", quantity)
    return _write(path, quantity, set(SUITE_QUANTITIES[quantity]), shared, rows)


def _origin(device: str, dtype: str, uses_gpu: bool) -> dict[str, Any]:
    return {
        "origin": "measured",
        "device": device,
        "dtype": dtype,
        "python_version": platform.python_version(),
        "commit": commit(),
        "torch_version": _version("torch"),
        "triton_version": _version("triton") if uses_gpu else None,
        "ptxas_version": _ptxas_version() if uses_gpu else None,
    }


def _write(path: Path, quantity: str, expected: set[str], shared, rows) -> Path:
    """The whole file, or none of it."""
    complete = []
    for row in rows:
        if set(row) != expected:
            raise RecordError(
                f"{quantity}: a record must have the columns {sorted(expected)}, got {sorted(row)}"
            )
        complete.append({**shared, **row})
    if not complete:
        raise RecordError(f"{quantity}: nothing was measured for {shared.get('run', path)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(quantity), lineterminator="\n")
    writer.writeheader()
    writer.writerows(complete)
    content = text.getvalue().encode()
    # No time stamp inside, so that the same records give the same bytes.
    temporary.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    temporary.replace(path)
    return path


def read_records(suite: str, quantity: str, **wanted: Any) -> pandas.DataFrame:
    """All records of a quantity in a suite, from every run that has them.

    Args:
        wanted: column = value pairs that rows must match, e.g. ``architecture="pro"``.

    Raises:
        RecordError: no record matches; the message names the command that makes them.
    """
    import pandas

    files = sorted((RESULTS / suite).glob(f"*/{path_of(suite, '', quantity).name}"))
    frames = [pandas.read_csv(file, dtype={"size": str, "commit": str}) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if tuple(frame.columns) != columns(quantity):
            raise RecordError(
                f"{file}: not the columns of this version; delete it and run `{command_for(quantity, suite)}`"
            )
    table = pandas.concat([f.dropna(axis="columns", how="all") for f in frames]) if frames else None
    for column, value in wanted.items():
        if table is not None:
            table = table[table[column] == value]
    if table is None or table.empty:
        which = " with " + ", ".join(f"{k} = {v}" for k, v in wanted.items()) if wanted else ""
        here = "" if Path("experiments").is_dir() else " (run from the project's folder)"
        raise RecordError(
            f"no records of {quantity} in results/{suite}{which}{here}; make them with "
            f"`{command_for(quantity, suite)}`"
        )
    return table.reindex(columns=list(columns(quantity))).reset_index(drop=True)


@functools.cache
def commit() -> str | None:
    """The project's commit, with ``-dirty`` where tracked files differ.

    Outside a checkout ``$ACP_REPRO_COMMIT``, for machines that get the files without the history, or None.
    """
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(root), *arguments), capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ACP_REPRO_COMMIT") or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _ptxas_version() -> str | None:
    """The ptxas that triton calls; two of its versions were reported to give wrong numbers."""
    try:
        import triton

        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        text = subprocess.run((ptxas, "--version"), capture_output=True, text=True).stdout
    except (ImportError, OSError):
        return None
    found = re.search(r"V(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else None


def processor_name() -> str:
    """The CPU's model name, for the ``device`` column."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
