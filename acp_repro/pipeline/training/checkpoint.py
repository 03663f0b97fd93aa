"""Checkpoints of a run in progress: weights and optimiser state, sharded, verified by hash.

A checkpoint is a folder ``step-00000042`` of safetensors files, one a rank. ``torch.distributed.checkpoint``
writes and reads it. So a run can continue with another number of ranks, with DDP, FSDP2 or neither. Nothing
is unpickled: the header of each file says where its pieces belong. ``run.json`` beside them describes the
run, so a checkpoint holds the settings of its weights.

The folder gets its name once all of it is on the disk, ``SHA256SUMS`` included. A checkpoint that does not
match its sums is skipped with a warning, and the previous one is used. Two are kept. If the disk fills up
while the third is written, the last good one is still there.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ...common.errors import UserError
from ...common.files import sha256_of, sync
from .distributed import gather, on_rank_zero, rank, world_size

KEEP = 2
_NAME = re.compile(r"step-(\d{8})")
_SUMS = "SHA256SUMS"
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
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, description: dict
) -> Path:
    """Writes one checkpoint, with ``description`` as its ``run.json``, and deletes all but the newest
    :data:`KEEP`. All ranks must call."""
    path = folder / f"step-{step:08d}"
    temporary = folder / f".{path.name}"
    try:
        on_rank_zero(lambda: _begin(temporary, description))
        writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        with _alone_is_fine():
            dcp.save(training_state(model, optimizer), storage_writer=writer)
        sums = _hashes(temporary, on_rank_zero(lambda: _names(temporary)))
        on_rank_zero(lambda: _publish(temporary, path, sums))
    except (OSError, CheckpointException) as error:
        on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True))
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
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, report: Callable[[str], None]
) -> int | None:
    """Fills weights and optimiser from the newest checkpoint whose hashes match; gives its steps, if any.

    All ranks must call. The number of ranks that wrote the checkpoint makes no difference. ``report`` is
    called with one line for every checkpoint that is skipped.
    """
    paths = on_rank_zero(lambda: sorted(_checkpoints(folder), reverse=True))
    for path in paths:
        if _is_intact(path):
            _read(path, model, optimizer)
            # Otherwise the skipped one would count as one of those that are kept.
            on_rank_zero(lambda good=path: _drop_newer(folder, good))
            return int(_NAME.fullmatch(path.name).group(1))
        report(f"{path}: does not match its {_SUMS}; using an older checkpoint")
    if paths:
        raise CheckpointError(f"{folder}: no checkpoint is intact; delete the folder to start again")
    return None


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint by name, without reading it."""
    return max(_checkpoints(folder), default=None)


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


def _names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != _SUMS)


def _hashes(path: Path, names: list[str]) -> dict[str, str | None]:
    """SHA-256 of each file, None for a file that cannot be read. The ranks share the work."""

    def of(name: str) -> str | None:
        try:
            return sha256_of(path / name)
        except OSError:
            return None

    shares = gather({name: of(name) for name in names[rank() :: world_size()]})
    return {name: digest for share in shares for name, digest in share.items()}


def _is_intact(path: Path) -> bool:
    """Whether the folder holds the files of its ``SHA256SUMS``, as they were written."""
    sums, names = on_rank_zero(lambda: (_read_sums(path), _names(path)))
    return bool(sums) and _hashes(path, names) == sums


def _begin(temporary: Path, description: dict) -> None:
    """Creates the folder with its ``run.json`` alone."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for leftover in temporary.parent.glob(".step-*"):  # of a run that was killed
        shutil.rmtree(leftover)
    temporary.mkdir()
    (temporary / "run.json").write_text(json.dumps(description))
    sync(temporary / "run.json")


def _publish(temporary: Path, path: Path, sums: dict[str, str | None]) -> None:
    """Names the checkpoint, which is then all on the disk, and deletes the oldest."""
    if None in sums.values():
        raise OSError(f"{temporary} cannot be read back")
    sums_file = temporary / _SUMS
    sums_file.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    sync(sums_file)
    sync(temporary)
    if path.exists():  # one that was skipped
        shutil.rmtree(path)
    temporary.rename(path)
    sync(path.parent)
    for old in sorted(_checkpoints(path.parent))[:-KEEP]:
        shutil.rmtree(old)


def _drop_newer(folder: Path, good: Path) -> None:
    for path in _checkpoints(folder):
        if path.name > good.name:
            shutil.rmtree(path)


def _read_sums(path: Path) -> dict[str, str]:
    """``SHA256SUMS`` in the format of sha256sum: hash, two spaces, name."""
    try:
        lines = (path / _SUMS).read_text().splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


@contextlib.contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Hides torch's warning that there is no process group: a single rank trains without one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
