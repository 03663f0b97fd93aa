"""Checkpoints of a run in progress: weights and optimiser state, sharded, verified by hash.

A checkpoint is a folder ``step-00000042`` of safetensors files, one a rank. ``torch.distributed.checkpoint``
writes and reads it. So a run can continue with another number of ranks, with DDP, FSDP2 or neither. Nothing
is unpickled: the header of each file says where its pieces belong.

A checkpoint is an artifact, whose manifest has the content of ``run.json`` and the digest of the run's
settings. A checkpoint that is damaged or belongs to a run of other settings is skipped with a warning, and
the previous one is used. Two are kept. If the disk fills up while the third is written, the last good one is
still there.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ...common.artifacts import ArtifactError, begin, identify_run, open_or_explain, publish
from ...common.errors import UserError
from .distributed import on_rank_zero

KEEP = 2
_NAME = re.compile(r"step-(\d{8})")
_STEP = "optimizer.step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be written or read; the message says what is left and what to do."""


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors from which a run continues: the model's, AdamW's two moments, and the number of updates.

    All except the last share memory with the model and the optimiser. Weights may be sharded (DTensor). State
    that the optimiser does not have yet is created here, as zeros.
    """
    # A tied weight appears once, under the first of its names.
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = {f"model.{n}": t.detach() for n, t in model.state_dict().items() if n not in weights}
    for name, parameter in model.named_parameters():
        of_parameter = optimizer.state[parameter]
        if not of_parameter:  # as AdamW itself begins
            of_parameter["step"] = torch.zeros((), device=parameter.device)
            of_parameter.update({key: torch.zeros_like(parameter) for key in _MOMENTS})
        state[f"model.{name}"] = parameter.detach()
        for key in _MOMENTS:
            state[f"optimizer.{key}.{name}"] = of_parameter[key].detach()
        state[_STEP] = of_parameter["step"].reshape(1).clone()
    return state


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    description: Mapping[str, Any],
) -> Path:
    """Writes one checkpoint of the run that ``description`` (``run.json``) describes, and deletes all but the
    newest :data:`KEEP`. All ranks must call."""
    path = folder / f"step-{step:08d}"
    try:
        temporary = on_rank_zero(lambda: _begin(path))
        writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        with _alone_is_fine():
            dcp.save(training_state(model, optimizer), storage_writer=writer)
        on_rank_zero(lambda: publish(path, identify_run(description), description))
        on_rank_zero(lambda: _delete(sorted(_checkpoints(folder))[:-KEEP]))
    except (OSError, CheckpointException) as error:
        on_rank_zero(lambda: _delete(folder.glob(".step-*")))
        if isinstance(error, CheckpointException):  # the first rank's own error
            error = next(cause for cause, _ in error.failures.values())
        if not isinstance(error, Exception):  # no fault of the disk, such as Ctrl-C
            raise error
        raise CheckpointError(
            f"could not write {path}: {getattr(error, 'strerror', None) or error}; the last good one is "
            f"{latest_checkpoint(folder)}. Free some space, and the same command continues from there"
        ) from error
    return path


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    description: Mapping[str, Any],
    report: Callable[[str], None],
) -> int | None:
    """Fills weights and optimiser from the newest intact checkpoint of the run that ``description``
    describes; gives its steps, if any.

    All ranks must call. The number of ranks that wrote the checkpoint makes no difference. ``report`` is
    called with one line for every checkpoint that is skipped.
    """
    path = on_rank_zero(lambda: _choose(folder, description, report))
    if path is None:
        return None
    _read(path, model, optimizer)
    return int(_NAME.fullmatch(path.name).group(1))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint by name, without reading it."""
    return max(_checkpoints(folder), default=None)


def _choose(folder: Path, description: Mapping[str, Any], report: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint of the run; deletes the newer ones, which would count as kept."""
    paths = sorted(_checkpoints(folder), reverse=True)
    for skipped, path in enumerate(paths):
        try:
            open_or_explain(path, identify_run(description), remedy="using an older checkpoint")
        except ArtifactError as error:
            report(str(error))
        else:
            _delete(paths[:skipped])
            return path
    if paths:
        raise CheckpointError(
            f"{folder}: no checkpoint is intact and of these settings; delete the folder to start again"
        )
    return None


def _read(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = training_state(model, optimizer)
    reader = dcp.HuggingFaceStorageReader(str(path))
    stored = {name: tuple(x.size) for name, x in reader.read_metadata().state_dict_metadata.items()}
    wanted = {name: tuple(x.shape) for name, x in state.items()}
    if stored != wanted:
        raise CheckpointError(f"{path} is of another model; delete {path.parent} to start again")
    with _alone_is_fine():
        dcp.load(state, storage_reader=reader)  # in place
    for of_parameter in optimizer.state.values():
        of_parameter["step"].copy_(state[_STEP][0])


def _checkpoints(folder: Path) -> list[Path]:
    return [p for p in folder.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()]


def _begin(path: Path) -> Path:
    _delete(path.parent.glob(".step-*"))  # of a run that was killed
    return begin(path)


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Hides torch's warning that there is no process group: a single rank trains without one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
