"""The folder of a run: what it contains, which process may write to it, and the tests of its weights.

A run folder holds all that explains it::

    run.json        what was run: the resolved settings, the data, ranks, versions and commit
    metrics.jsonl   one line a step
    checkpoints/    the newest two, each with the content of run.json, until the run is done
    model/          config.json and model.safetensors, in the authors' format, once it is done
    done.json       tokens, seconds, the last loss, peak memory, the hashes of weights and settings
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ...common import files
from ...common.artifacts import MANIFEST, identify_run, is_current, open_or_explain, write_manifest
from ...common.errors import UserError
from ...common.files import read_json
from ..freshness import differences, has_weights
from ..provenance import commit, device_name, version
from ..run import Run
from . import checkpoint
from .distributed import on_rank_zero, rank, world_size

if TYPE_CHECKING:
    from .task import Task


class TrainingError(UserError, RuntimeError):
    """The run cannot continue; the message says why and what to do."""


class RunFolder:
    """The folder of a run in training. All ranks call each method; rank 0 alone reads, decides and writes.

    Args:
        report: called with lines for the user, on rank 0.
    """

    def __init__(self, run: Run, report: Callable[[str], None] = print):
        self.run, self.path = run, run.folder
        self.checkpoints = self.path / "checkpoints"
        self.description: dict[str, Any] = {}  # the content of run.json
        self._report = str if rank() else report  # str prints nothing
        self._log: TextIO | None = None

    def is_done(self) -> bool:
        """Whether nothing is left to train, in which case the user is told."""
        if not on_rank_zero(lambda: is_done(self.run)):
            return False
        self._report(f"{self.run.name}: already done")
        if self.run.weights is None:
            self._delete_checkpoints()  # a killed process may have left them
        return True

    def begin(self, stack: contextlib.ExitStack) -> bool:
        """Locks the folder until ``stack`` closes; False if another process has just finished the run.

        Refuses to overwrite a run of other or unknown settings, or weights unlike ``done.json``.
        """
        if self.run.weights is not None:
            raise TrainingError(
                f"{self.path}: the ready weights of {self.run.name} are missing or changed; fetch them "
                f"again, or train them with `{self.run.command}`"
            )

        def lock_and_check() -> bool:
            stack.enter_context(lock(self.path))
            _check_unchanged(self.run)
            return not is_done(self.run)

        return on_rank_zero(lock_and_check)

    def describe(self, device: torch.device, facts: dict[str, Any]) -> None:
        """Writes ``run.json``: settings, software, machine, and the facts of `Task.describe`.

        Refuses to continue with other text. The settings stay those with which the run was begun, because
        they identify its checkpoints: code that has gained a setting since then continues the run.
        """
        run, ranks = self.run, world_size()
        on_rank_zero(lambda: _check_same_text(run, facts["data"]))
        launcher = f"torchrun --standalone --nproc-per-node {ranks} -m --"
        self.description = {
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
        on_rank_zero(lambda: files.write_json(self.path / "run.json", self.description))

    def load_checkpoint(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Fills weights and optimiser from the newest intact checkpoint of this run; returns its step, or 0
        without a checkpoint."""
        step = checkpoint.load_checkpoint(self.checkpoints, model, optimizer, self.description, self._report)
        if step:
            self._report(f"{self.run.name}: continuing from step {step}")
        return step or 0

    def save_checkpoint(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Writes the checkpoint after ``step`` steps, and returns its folder."""
        return checkpoint.save_checkpoint(self.checkpoints, step, model, optimizer, self.description)

    def latest_checkpoint(self) -> Path | None:
        """The newest checkpoint by name, without reading it."""
        return checkpoint.latest_checkpoint(self.checkpoints)

    def open_log(self, first_step: int) -> None:
        """Opens ``metrics.jsonl``, one JSON object a step.

        Lines of steps from ``first_step`` on are dropped first, because they will be written again. A last
        line that a kill cut short is dropped too.
        """
        if rank():
            return
        path, kept = self.path / "metrics.jsonl", []
        for line in path.read_text().split("\n") if path.exists() else ():
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] < first_step:
                    kept.append(line + "\n")
        files.write_text(path, "".join(kept))
        self._log = path.open("a")

    def write_step(self, record: dict[str, Any]) -> None:
        """Adds one step to the log: numbers, lists or mappings."""
        if self._log is not None:
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()

    def close_log(self) -> None:
        """Closes ``metrics.jsonl``."""
        if self._log is not None:
            self._log.close()

    def finish(self, task: Task, model: nn.Module) -> None:
        """Writes the trained weights and ``done.json``, and deletes the checkpoints."""
        weights = None
        if isinstance(next(model.parameters()), DTensor):  # whole weights on the CPU of rank 0
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=whole)
        on_rank_zero(lambda: self._publish(task, model, weights))
        self._delete_checkpoints()

    def _publish(self, task: Task, model: nn.Module, weights: dict[str, Tensor] | None) -> None:
        # Weights get their name last, because Make takes them as the sign that the run is complete.
        unnamed = self.path / ".model"
        unnamed.mkdir(exist_ok=True)
        task.save(model, unnamed, weights)
        write_done(self.run, task.step_tokens, unnamed / "model.safetensors")
        shutil.rmtree(self.path / "model", ignore_errors=True)
        unnamed.replace(self.path / "model")

    def _delete_checkpoints(self) -> None:
        on_rank_zero(lambda: shutil.rmtree(self.checkpoints, ignore_errors=True))


# --- the folder on disk, also of runs that are not in training ----------------------------------------------


def is_done(run: Run) -> bool:
    """Whether the folder holds the complete weights of exactly these settings; ready ones have none."""
    return has_weights(run) and is_current(run.weights_file, _inputs(run), run.folder / "done.json")


def check_done(run: Run) -> None:
    """Checks that the folder holds finished weights of these settings."""
    if not is_done(run):
        raise TrainingError(
            f"{run.folder} holds no finished weights of these settings; train them with `{run.command}`"
        )


def _check_unchanged(run: Run) -> None:
    begun = checkpoint.latest_checkpoint(run.folder / "checkpoints") is not None
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
        (checkpoint.latest_checkpoint(run.folder / "checkpoints") or run.folder) / MANIFEST
    )


def text_hash(run: Run) -> str | None:
    """The hash of the text and tokeniser with which the run was begun, if its folder has it."""
    return (description(run).get("data") or {}).get("hash")


def _check_same_text(run: Run, data: dict[str, Any]) -> None:
    """Refuses to continue with other text, or with a tokeniser that was trained on other text."""
    if text_hash(run) not in (None, data.get("hash")):
        raise TrainingError(
            f"{run.folder} was begun with other text than corpus {data.get('corpus', 'of it')} holds "
            "now (on another machine, or files came or went). Put it back, or delete the run to train "
            f"again: rm -r {run.folder}"
        )


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
