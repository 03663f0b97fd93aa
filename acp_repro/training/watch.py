"""Watches a run: its log, and where a NaN comes from."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ..common import files
from .graphs import without_graphs


class RunLog:
    """``FOLDER/metrics.jsonl``, one JSON object a step, and the same numbers for TensorBoard if requested.

    Lines of steps from ``first_step`` on are dropped first, because they will be written again. A last
    line that a kill cut short is dropped too. JSON has no NaN, so a number that is not finite is written as
    null.

    Args:
        folder: the run's folder; must exist.
        first_step: the next step.
        tensorboard: also write ``FOLDER/tensorboard``; lists and mappings become ``KEY/ENTRY``.

    Raises:
        RuntimeError: TensorBoard is requested and not installed.
    """

    def __init__(self, folder: Path, first_step: int, *, tensorboard: bool = False):
        path = Path(folder) / "metrics.jsonl"
        self._board = _summary_writer(path.parent / "tensorboard", first_step, tensorboard)
        _keep_steps_before(path, first_step)
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Writes one step: ``record["step"]`` is its number, the other values are numbers, lists or
        mappings."""
        self._file.write(json.dumps(_finite_or_null(record), allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(record):
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _summary_writer(folder: Path, first_step: int, wanted: bool):
    if not wanted:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RuntimeError(
            "TensorBoard is not installed; pip install -e '.[tensorboard]', or leave out --tensorboard"
        ) from None
    return SummaryWriter(str(folder), purge_step=first_step)  # hides the steps that will be written again


def _keep_steps_before(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().split("\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
    files.write_text(path, "".join(kept))


def _scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings and lists, with their path as their name."""
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    else:
        if isinstance(value, int | float):
            yield name, value
        return
    for key, entry in entries:
        yield from _scalars(entry, f"{name}/{key}" if name else str(key))


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def first_non_finite(
    model: nn.Module, loss_of: Callable[..., Tensor], batch: Sequence[Tensor], *, dtype: str
) -> str:
    """Where the first NaN or infinity arises on this micro-batch, in one line.

    It runs forward and backward once more, eager and watched; the gradients of ``model`` are lost. With
    several ranks every rank must call it, and each reports on its own micro-batch.

    ``torch.autograd.detect_anomaly`` cannot do this. It sees only NaN and only the backward pass, names an
    operator but no layer, and raises while other ranks wait.

    Args:
        model: the model, or a wrapper of it whose forward takes the same arguments.
        loss_of: ``loss_of(model, *batch)``; see ``Task.loss``.
        batch: tensors on the model's device.
        dtype: ``bfloat16`` (autocast) or ``float32``.

    Returns:
        For example ``layer 3: attn.core turns finite inputs into nan``.
    """
    for name, parameter in model.named_parameters():
        # Whole, if it is sharded: all ranks must find the same answer; otherwise some would wait.
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if bad := _bad_value(whole):
            return f"the weight {_place(name)} holds {bad}"

    found: list[str] = []
    places = {module: _place(name) for name, module in model.named_modules() if name}

    def note(tensor: Tensor | None, text: str) -> None:
        # Only the first counts. The pass continues: other ranks may wait for this one.
        if not found and (bad := _bad_value(tensor)):
            found.append(f"{text} {bad}")

    def watch(tensors, forward: str, backward: str) -> None:
        for tensor in tree_leaves(tensors):
            note(tensor, forward)
            # By hooks on the tensors, because gradient checkpointing does not work with full backward hooks.
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: note(gradient, backward))

    def before(module: nn.Module, inputs) -> None:
        if place := places.get(module):
            turns = f"the backward pass of {place} turns finite gradients into"
            watch(inputs, f"the input of {place} is", turns)

    def after(module: nn.Module, _inputs, outputs) -> None:
        if place := places.get(module):
            watch(outputs, f"{place} turns finite inputs into", f"the gradient that reaches {place} is")

    model.zero_grad(set_to_none=True)
    with (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after),
        eager(batch[0].device, dtype),
    ):
        try:
            loss = loss_of(model, *batch)
            note(loss, "the head, whose input is finite, gives a loss of")
            loss.backward()
        except ValueError:  # a CPU's attention refuses the NaN itself
            if not found:
                raise
    for name, parameter in reversed([*model.named_parameters()]):  # in the order of the backward pass
        note(parameter.grad, f"the gradient of the weight {_place(name)} is")
    model.zero_grad(set_to_none=True)
    return found[0] if found else "all is finite on this micro-batch, run eagerly"


def _place(name: str) -> str:
    """``model.layers.3.attn.core`` -> ``layer 3: attn.core``, without the names of wrappers."""
    parts = [p for p in name.split(".") if p not in ("module", "_orig_mod", "_checkpoint_wrapped_module")]
    parts = parts[1:] if parts[:1] == ["model"] else parts
    if parts[:1] == ["layers"] and len(parts) > 1:
        return f"layer {parts[1]}: {'.'.join(parts[2:]) or 'the whole block'}"
    return ".".join(parts) or "the model"


def _bad_value(tensor: Any) -> str | None:
    """``nan`` or ``inf`` if it is a tensor that holds one."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return None
    # Detached; otherwise the check would save tensors for the backward pass. Only the shard: no collective
    # here.
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if bool(torch.isfinite(tensor).all()):
        return None
    return "nan" if bool(torch.isnan(tensor).any()) else "inf"


@contextlib.contextmanager
def eager(device: torch.device, dtype: str) -> Iterator[None]:
    """Inside, torch.compile and CUDA graphs are off, and the dtype's autocast is on."""
    with (
        without_graphs(),
        torch.compiler.set_stance("force_eager"),
        torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        yield
