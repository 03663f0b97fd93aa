"""The folder of a run: its lock, provenance, log, checkpoints, and the validation of its weights.

A run folder documents the run completely::

    run.json        provenance: the resolved settings, the data, ranks, versions and commit
    metrics.jsonl   one line per step
    checkpoints/    the newest two, each with the content of run.json, until the run is done
    model/          config.json and model.safetensors, in the authors' format, once the run is done
    done.json       tokens, seconds, the last loss, peak memory, the hashes of weights and settings

A checkpoint is a folder such as ``step-00000042`` with one safetensors file per rank, which
``torch.distributed.checkpoint`` writes and reads. A run can therefore resume with another number of ranks,
and with or without DDP or FSDP2. Nothing is unpickled: the header of each file locates its shards.

A checkpoint is an artifact, whose manifest contains ``run.json`` and the digest of the run's settings. A
checkpoint that is damaged or has other settings is skipped with a warning, and the previous one is loaded.
Two checkpoints are kept. If the disk fills up while the third is written, an intact one remains.
"""

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ...common import files
from ...common.artifacts import (
    MANIFEST,
    ArtifactError,
    begin,
    identify_run,
    is_current,
    open_or_explain,
    publish,
    write_manifest,
)
from ...common.errors import UserError
from ...common.files import read_json
from ..freshness import differences, has_weights
from ..provenance import commit, device_name, version
from ..run import Run
from .distributed import on_rank_zero, rank, world_size

KEEP = 2  # number of checkpoints
_NAME = re.compile(r"step-(\d{8})")
_STEP = "optimizer.step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingError(UserError, RuntimeError):
    """The run cannot continue; the message states the cause and the remedy."""


class RunFolder:
    """The folder of a run in training. All ranks call each method; only rank 0 reads, decides and writes.

    Args:
        report: a function that rank 0 calls with lines for the user.
    """

    def __init__(self, run: Run, report: Callable[[str], None] = print):
        self.run, self.path = run, run.folder
        self.checkpoints = self.path / "checkpoints"
        self.description: dict[str, Any] = {}  # the content of run.json
        self._report = str if rank() else report  # str prints nothing

    def is_done(self) -> bool:
        """Whether the run is already trained, which is then reported to the user."""
        if not on_rank_zero(lambda: is_done(self.run)):
            return False
        self._report(f"{self.run.name}: already done")
        if self.run.weights is None:
            self._delete_checkpoints()  # a killed process may have left them
        return True

    def begin(self, stack: contextlib.ExitStack) -> bool:
        """Locks the folder until ``stack`` closes; False if another process has just finished the run.

        Refuses to overwrite a run with other or unknown settings, or weights that do not match ``done.json``.
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

        Refuses to resume with other text. The settings with which the run began are kept, because they
        identify its checkpoints: a run can resume after a new setting was added to the code.
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
        """Loads weights and optimiser state from the newest intact checkpoint of this run and returns its
        step, or 0 without a checkpoint. Any number of ranks may have written the checkpoint."""
        path = on_rank_zero(self._choose_checkpoint)
        if path is None:
            return 0
        state = training_state(model, optimizer)
        reader = dcp.HuggingFaceStorageReader(str(path))
        stored = {name: tuple(x.size) for name, x in reader.read_metadata().state_dict_metadata.items()}
        wanted = {name: tuple(x.shape) for name, x in state.items()}
        assert stored == wanted, f"{path} belongs to another model; delete {path.parent} to train again"
        with _hide_group_warning():
            dcp.load(state, storage_reader=reader)  # in place
        for of_parameter in optimizer.state.values():
            of_parameter["step"].copy_(state[_STEP][0])
        step = int(_NAME.fullmatch(path.name)[1])
        self._report(f"{self.run.name}: continuing from step {step}")
        return step

    def _choose_checkpoint(self) -> Path | None:
        """The newest intact checkpoint of the run; deletes newer ones, which would count towards `KEEP`."""
        paths = _list_checkpoints(self.checkpoints)[::-1]
        for skipped, path in enumerate(paths):
            try:
                open_or_explain(path, identify_run(self.description), remedy="using an older checkpoint")
            except ArtifactError as error:
                self._report(str(error))
            else:
                _delete(paths[:skipped])
                return path
        if paths:
            raise TrainingError(
                f"{self.checkpoints}: no checkpoint is intact and has these settings; delete the folder to "
                "train again"
            )
        return None

    def save_checkpoint(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Writes the checkpoint after ``step`` steps and returns its folder; keeps the newest `KEEP`."""
        path = self.checkpoints / f"step-{step:08d}"
        try:
            on_rank_zero(lambda: _delete(self.checkpoints.glob(".step-*")))  # left by a killed process
            temporary = on_rank_zero(lambda: begin(path))
            writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
            with _hide_group_warning():
                dcp.save(training_state(model, optimizer), storage_writer=writer)
            on_rank_zero(lambda: publish(path, identify_run(self.description), self.description))
            on_rank_zero(lambda: _delete(_list_checkpoints(self.checkpoints)[:-KEEP]))
        except (OSError, CheckpointException) as error:
            on_rank_zero(lambda: _delete(self.checkpoints.glob(".step-*")))
            if isinstance(error, CheckpointException):  # the first rank's own error
                error = next(cause for cause, _ in error.failures.values())
            if not isinstance(error, Exception):  # not a disk error, but Ctrl-C, for example
                raise error
            raise TrainingError(
                f"cannot write {path}: {getattr(error, 'strerror', None) or error}; the last good one is "
                f"{latest_checkpoint(self.run)}. Free disk space, and the same command resumes from there"
            ) from error
        return path

    @contextlib.contextmanager
    def open_log(self, first_step: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A context with a function that appends a step, a JSON object, to ``metrics.jsonl``.

        It first removes the lines of steps from ``first_step`` on, which will be written again, and a last
        line that was truncated when the process was killed.
        """
        if rank():
            yield lambda step: None
            return
        path, kept = self.path / "metrics.jsonl", []
        for line in path.read_text().split("\n") if path.exists() else ():
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] < first_step:
                    kept.append(line + "\n")
        files.write_text(path, "".join(kept))
        with path.open("a") as log:
            # JSON has no NaN and no infinity: they are written as null.
            finite = json.JSONDecoder(parse_constant=lambda name: None).decode
            yield lambda step: print(json.dumps(finite(json.dumps(step))), file=log, flush=True)

    def finish(self, model: nn.Module, save: Callable[..., None], step_tokens: int) -> None:
        """Writes the trained weights and ``done.json``, and deletes the checkpoints.

        Args:
            save: `Task.save`, which writes the weights.
            step_tokens: tokens of a step.
        """
        weights = None
        if isinstance(next(model.parameters()), DTensor):  # gathers the weights on the CPU of rank 0
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=whole)
        on_rank_zero(lambda: self._publish(model, weights, save, step_tokens))
        self._delete_checkpoints()

    def _publish(
        self, model: nn.Module, weights: dict[str, Tensor] | None, save: Callable[..., None], step_tokens: int
    ) -> None:
        # The weights are renamed last, because their existence tells Make that the run is complete.
        unnamed = self.path / ".model"
        unnamed.mkdir(exist_ok=True)
        save(model, unnamed, weights)
        write_done(self.run, step_tokens, unnamed / "model.safetensors")
        shutil.rmtree(self.path / "model", ignore_errors=True)
        unnamed.replace(self.path / "model")

    def _delete_checkpoints(self) -> None:
        on_rank_zero(lambda: shutil.rmtree(self.checkpoints, ignore_errors=True))


# --- checkpoints --------------------------------------------------------------------------------------------


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a checkpoint: the model's state, AdamW's two moments, and the number of updates.

    All except the last share memory with the model and the optimiser. Weights may be sharded (DTensor).
    Missing optimiser state is created as zeros.
    """
    # A tied weight is stored once, under the first of its names.
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = {f"model.{n}": t.detach() for n, t in model.state_dict().items() if n not in weights}
    for name, parameter in model.named_parameters():
        of_parameter = optimizer.state[parameter]
        if not of_parameter:  # as AdamW initialises its state
            of_parameter["step"] = torch.zeros((), device=parameter.device)
            of_parameter.update({key: torch.zeros_like(parameter) for key in _MOMENTS})
        state[f"model.{name}"] = parameter.detach()
        for key in _MOMENTS:
            state[f"optimizer.{key}.{name}"] = of_parameter[key].detach()
        state[_STEP] = of_parameter["step"].reshape(1).clone()
    return state


def latest_checkpoint(run: Run) -> Path | None:
    """The newest checkpoint by name; its content is not read."""
    return max(_list_checkpoints(run.folder / "checkpoints"), default=None)


def _list_checkpoints(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir())


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _hide_group_warning() -> Iterator[None]:
    """A context that hides torch's warning about a missing process group: a single rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


# --- the folder on disk, whether or not the run is in training ----------------------------------------------


def is_done(run: Run) -> bool:
    """Whether the folder contains complete weights of exactly these settings; ready weights have none."""
    return has_weights(run) and is_current(run.weights_file, _inputs(run), run.folder / "done.json")


def check_done(run: Run) -> None:
    """Checks that the folder contains finished weights of these settings."""
    if not is_done(run):
        raise TrainingError(
            f"{run.folder} contains no finished weights of these settings; train them with `{run.command}`"
        )


def _check_unchanged(run: Run) -> None:
    begun = latest_checkpoint(run) is not None
    finished = run.weights_file.is_file() and not begun
    before = description(run).get("settings")
    if before is None and (begun or finished):  # otherwise nothing would be overwritten
        raise TrainingError(
            f"{run.folder}/run.json is missing or damaged, so the weights' settings are unknown. Copy it "
            f"back, or delete the run to train again: rm -r {run.folder}"
        )
    if other := before is not None and differences(before, run):
        raise TrainingError(
            f"{run.folder} was started with other settings: {'; '.join(other)}. Restore them, or "
            f"delete the run to train again: rm -r {run.folder}"
        )
    if finished:
        remedy = f"copy the run's own file back, or delete the run to train again: rm -r {run.folder}"
        open_or_explain(run.weights_file, _inputs(run), manifest=run.folder / "done.json", remedy=remedy)


def _inputs(run: Run) -> dict[str, str] | None:
    """The inputs that identify the run's weights; None for ready weights, whose folder has no settings."""
    return identify_run(description(run)) if run.weights is None else None


def description(run: Run) -> dict[str, Any]:
    """The content of ``run.json`` or, if it is missing or damaged, of the newest checkpoint's manifest; empty
    if both are unreadable."""
    newest = latest_checkpoint(run) or run.folder
    return read_json(run.folder / "run.json") or read_json(newest / MANIFEST)


def text_hash(run: Run) -> str | None:
    """The hash of the text and tokeniser with which the run began, or None if it is not recorded."""
    return (description(run).get("data") or {}).get("hash")


def check_trained_text(run: Run, corpus: str, text: str) -> None:
    """Refuses to measure a run with other text or another tokenizer than in training; ``text`` is a hash."""
    if text_hash(run) not in (None, text):
        raise TrainingError(
            f"{run.folder} was trained on other text than corpus {corpus} contains now, or with another "
            f"tokenizer. Restore the text, or delete the run and train again with `{run.command}`"
        )


def _check_same_text(run: Run, data: dict[str, Any]) -> None:
    """Refuses to resume with other text, or with a tokeniser that was trained on other text."""
    if text_hash(run) not in (None, data.get("hash")):
        raise TrainingError(
            f"{run.folder} was started with other text than corpus {data.get('corpus', 'of it')} "
            "contains now (another machine, or changed files). Restore the text, or delete the run to train "
            f"again: rm -r {run.folder}"
        )


def write_done(run: Run, step_tokens: int, weights: Path) -> None:
    """Writes ``done.json`` from the lines of ``metrics.jsonl`` and the file of weights."""
    lines = files.read_json_lines(run.folder / "metrics.jsonl")
    seconds = [step_tokens / x["throughput_tokens_per_s"] for x in lines]
    gpus = [x["ranks"] for x in lines]  # the number may change when a run resumes
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
    """Whether blocks are compiled; never on a CPU, where torch.compile takes minutes and gains little."""
    return run.training.compile and device.type == "cuda"


def lock(folder: Path):
    """A context that locks a run for one process; the lock ends with the process, for any reason."""
    return files.lock(folder / ".lock", refuse=f"{folder}: another process is training this run")
