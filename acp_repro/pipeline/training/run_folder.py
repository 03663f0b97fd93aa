"""The folder of a run: what it records of the run, and which process may write to it. See ``loop``."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import torch

from ...common import files
from ...common.artifacts import MANIFEST, identify_run, is_current, open_or_explain, write_manifest
from ...common.errors import UserError
from ...common.files import read_json
from ..freshness import differences, has_weights
from ..provenance import commit, device_name, version
from ..run import Run
from .checkpoint import latest_checkpoint
from .distributed import world_size


class TrainingError(UserError, RuntimeError):
    """The run cannot continue; the message says why and what to do."""


def is_done(run: Run) -> bool:
    """Whether the folder holds the complete weights of exactly these settings; ready ones have none."""
    return has_weights(run) and is_current(run.weights_file, _inputs(run), run.folder / "done.json")


def check_done(run: Run) -> None:
    """Checks that the folder holds finished weights of these settings."""
    if not is_done(run):
        raise TrainingError(
            f"{run.folder} holds no finished weights of these settings; train them with `{run.command}`"
        )


def check_unchanged(run: Run) -> None:
    """Refuses to overwrite a run of other or unknown settings, or weights unlike ``done.json``."""
    begun = latest_checkpoint(run.folder / "checkpoints") is not None
    finished = run.weights_file.is_file() and not begun
    before = description(run).get("settings")
    if before is None and (begun or finished):  # otherwise there is nothing to lose
        raise TrainingError(
            f"{run.folder}/run.json is missing or damaged, so the weights' settings are unknown. Copy it "
            f"back, or delete the run to train again: rm -r {run.folder}"
        )
    if other := before is not None and differences(before, run):
        raise TrainingError(
            f"{run.folder} was begun with other settings: {'; '.join(other)}. Put them back, or "
            f"delete it to train again: rm -r {run.folder}"
        )
    if finished:
        remedy = f"copy the run's own file back, or delete the run to train again: rm -r {run.folder}"
        open_or_explain(run.weights_file, _inputs(run), manifest=run.folder / "done.json", remedy=remedy)


def _inputs(run: Run) -> dict[str, str] | None:
    """The identity of the run's weights; None for ready weights, whose settings are not in their folder."""
    return identify_run(description(run)) if run.weights is None else None


def description(run: Run) -> dict[str, Any]:
    """The content of ``run.json``, or of the newest checkpoint's manifest if that file is missing or damaged;
    empty if neither can be read."""
    return read_json(run.folder / "run.json") or read_json(
        (latest_checkpoint(run.folder / "checkpoints") or run.folder) / MANIFEST
    )


def text_hash(run: Run) -> str | None:
    """The hash of the text and tokeniser with which the run was begun, if its folder has it."""
    return (description(run).get("data") or {}).get("hash")


def check_same_text(run: Run, data: dict[str, Any]) -> None:
    """Refuses to continue with other text, or with a tokeniser that was trained on other text."""
    if text_hash(run) not in (None, data.get("hash")):
        raise TrainingError(
            f"{run.folder} was begun with other text than corpus {data.get('corpus', 'of it')} holds "
            "now (on another machine, or files came or went). Put it back, or delete the run to train "
            f"again: rm -r {run.folder}"
        )


def describe(run: Run, device: torch.device, facts: dict[str, Any]) -> dict[str, Any]:
    """The content of ``run.json``: settings, software, machine, and the facts of `Task.describe`.

    The settings stay those with which the run was begun, because they identify its checkpoints: code that has
    gained a setting since then continues the run.
    """
    ranks = world_size()
    launcher = f"torchrun --standalone --nproc-per-node {ranks} -m --"
    return {
        "settings": description(run).get("settings") or run.as_dict(),
        "command": run.command if ranks == 1 else run.command.replace("python -m", launcher, 1),
        "device": device_name(device),
        "ranks": ranks,
        "parallel": run.parallel_mode(ranks),
        "compile": compiles(run, device),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "triton": version("triton"), "commit": commit()},
        **facts,
    }


def write_done(run: Run, step_tokens: int, weights: Path) -> None:
    """Writes ``done.json``, from the lines of ``metrics.jsonl`` and the file of weights."""
    lines = files.read_json_lines(run.folder / "metrics.jsonl")
    seconds = [step_tokens / x["throughput_tokens_per_s"] for x in lines]
    gpus = [x["ranks"] for x in lines]  # a resume may have changed the number
    tail = [x["loss_nats"] for x in lines[-max(1, len(lines) // 20) :]]
    memory = [x["peak_memory_bytes"] for x in lines if "peak_memory_bytes" in x]
    done = {
        "tokens": lines[-1]["tokens"],
        "seconds": round(sum(seconds), 3),
        "gpu_seconds": round(sum(s * n for s, n in zip(seconds, gpus, strict=True)), 3),
        "loss_nats_last_20th": sum(tail) / len(tail),
        "ranks": world_size(),
        **({"peak_memory_bytes": max(memory)} if memory else {}),
    }
    write_manifest(run.folder / "done.json", weights, identify_run(description(run)), done)


def compiles(run: Run, device: torch.device) -> bool:
    """Whether blocks go through torch.compile. Never on a CPU, where it costs minutes and gains little."""
    return run.training.compile and device.type == "cuda"


def lock(folder: Path):
    """A context that one process a run may be in; it is released when the process ends, for any reason."""
    return files.lock(folder / ".lock", refuse=f"{folder}: another process is training this run")


class RunLog(contextlib.AbstractContextManager):
    """``FOLDER/metrics.jsonl``, one JSON object a step.

    Lines of steps from ``first_step`` on are dropped first, because they will be written again. A last
    line that a kill cut short is dropped too.
    """

    def __init__(self, folder: Path, first_step: int):
        path, kept = folder / "metrics.jsonl", []
        for line in path.read_text().split("\n") if path.exists() else ():
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] < first_step:
                    kept.append(line + "\n")
        files.write_text(path, "".join(kept))
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Writes one step: numbers, lists or mappings."""
        self._file.write(json.dumps(_finite_or_null(record), allow_nan=False) + "\n")
        self._file.flush()

    def __exit__(self, *_) -> None:
        self._file.close()


def _finite_or_null(value: Any) -> Any:
    """JSON has no NaN, so a number that is not finite is written as null."""
    if isinstance(value, dict):
        return {key: _finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
