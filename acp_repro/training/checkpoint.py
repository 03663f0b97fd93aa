"""Checkpoints of a run in progress: weights and optimiser state, safetensors, verified by hash.

A checkpoint is one file ``step-00000042.safetensors`` whose name appears only once its bytes are on
the disk, and a line in ``SHA256SUMS``. A file that does not match its line is not used: the one before
it is, and the loss is reported. Two are kept, so that a disk that fills up while the third is written
leaves the last good one as it was.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

KEEP = 2
_NAME = re.compile(r"step-(\d{8})\.safetensors")
_SUMS = "SHA256SUMS"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what is left and what to do."""


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights under ``model.``, and each parameter's optimiser state under ``optimizer.NAME.``."""
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{key}.{name}"] = value
    return state


def restore_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]
) -> None:
    """The inverse of :func:`training_state`, in place.

    Raises:
        CheckpointError: names or shapes differ from the model's.
    """
    parameters = dict(model.named_parameters())
    weights = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    wrong = sorted(
        set(weights) ^ set(parameters)
        | {n for n in weights if n in parameters and weights[n].shape != parameters[n].shape}
    )
    if wrong:
        raise CheckpointError(f"the checkpoint is of another model; tensors differ: {wrong[:5]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    for full_name, value in state.items():
        if full_name.startswith("optimizer."):
            _, key, name = full_name.split(".", 2)
            # Adam's step count lives on the CPU, its moments beside the weights.
            device = (
                value.device
                if value.dim() == 0 and not _is_fused(optimizer)
                else parameters[name].device
            )
            optimizer.state[parameters[name]][key] = value.to(device).clone()


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


def save_checkpoint(folder: Path, step: int, state: dict[str, Tensor]) -> Path:
    """Writes one checkpoint and drops all but the newest :data:`KEEP`.

    Raises:
        CheckpointError: the disk refused; the message names the last good checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):
        leftover.unlink()
    path = folder / f"step-{step:08d}.safetensors"
    temporary = folder / f".{path.name}"
    try:
        content = save({k: v.contiguous().cpu() for k, v in state.items()}, {"step": str(step)})
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        kept = sorted(p.name for p in folder.glob("step-*.safetensors") if p != path)[-(KEEP - 1) :]
        sums = _read_sums(folder)
        sums[path.name] = hashlib.sha256(content).hexdigest()
        _write_sums(folder, {name: sums[name] for name in (*kept, path.name) if name in sums})
        temporary.replace(path)
        _sync_folder(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        last = latest_step(folder)
        left = "there is no checkpoint yet" if last is None else f"step {last} is intact"
        raise CheckpointError(
            f"could not write {path}: {error.strerror or error}; {left}. Free some space and run the "
            "same command again to go on from there"
        ) from error
    for old in folder.glob("step-*.safetensors"):
        if old.name not in (*kept, path.name):
            old.unlink()
    return path


def load_checkpoint(
    folder: Path, report: Callable[[str], None]
) -> tuple[int, dict[str, Tensor]] | None:
    """The newest checkpoint whose hash is right, or None if the folder holds none.

    Args:
        report: called with one line for every checkpoint passed over.

    Raises:
        CheckpointError: there are checkpoints and none is good.
    """
    sums = _read_sums(folder)
    paths = sorted(folder.glob("step-*.safetensors"), reverse=True)
    for path in paths:
        problem = _problem(path, sums.get(path.name))
        if problem is None:
            state = load_file(path)
            return int(_NAME.fullmatch(path.name).group(1)), state
        report(f"{path}: {problem}; using an older checkpoint")
    if paths:
        raise CheckpointError(
            f"{folder}: none of {len(paths)} checkpoints is intact; delete the folder to start anew"
        )
    return None


def latest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint by name, without reading it."""
    steps = [int(m.group(1)) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return max(steps, default=None)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(path: Path, expected: str | None) -> str | None:
    if expected is None:
        return "not written by this run (no line in SHA256SUMS)"
    if sha256_of(path) != expected:
        return "corrupt (its hash differs from SHA256SUMS)"
    try:
        with safe_open(path, "pt"):
            return None
    except SafetensorError as error:
        return f"not a safetensors file ({error})"


def _read_sums(folder: Path) -> dict[str, str]:
    """``SHA256SUMS`` in the format of sha256sum: hash, two spaces, name."""
    try:
        lines = (folder / _SUMS).read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _write_sums(folder: Path, sums: dict[str, str]) -> None:
    temporary = folder / f".step-{_SUMS}"
    with temporary.open("w") as file:
        file.write("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / _SUMS)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
