"""Checkpoints in the authors' format: ``config.json`` and ``model.safetensors`` in one folder.

Tensor names are the official ones, so files move in both directions. Nothing is unpickled and nothing
from a checkpoint is run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import FoXConfig
from .fox import FoXForCausalLM

MODEL_TYPE = "forgetting_transformer-project_fox"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

# Official keys that select something this model does not have: what is supported, first the value
# that is written. A key that is absent from a file is taken to hold it.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_rope": (False,),
    "window_size": (None,),
    "tie_word_embeddings": (False,),
    "num_kv_heads": (None,),  # or num_heads, see _check_supported
    "fgate_type": ("full",),
    "attention_bias": (False,),
    "elementwise_affine": (True,),
    "hidden_act": ("swish", "silu"),
    "ogate_act": ("sigmoid",),
}
# Config fields that a file may leave out, because the default is the only sensible reading.
_OPTIONAL = ("intermediate_size", "max_position_embeddings", "initializer_range")
_FLOATING = ("F64", "F32", "F16", "BF16")
_MOST_LISTED = 40


def save_pretrained(
    model: torch.nn.Module, folder: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` that the official code reads.

    Each file is written under another name, flushed to the disk and renamed, so a reader or a crash
    never meets half a file.

    Args:
        model: a ``FoXForCausalLM`` (compiled or not).
        folder: made if it does not exist.
        state_dict: the tensors to write, for a model whose own are sharded; they must have the
            names and shapes of the model's.

    Raises:
        ValueError: when state_dict does not fit the model's config; lists the tensors.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    tensors = model.state_dict() if state_dict is None else dict(state_dict)
    _check_tensors(
        "state_dict",
        model.config,
        {name: tuple(t.shape) for name, t in tensors.items()},
        [name for name, t in tensors.items() if not t.is_floating_point()],
    )
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_official_dict(model.config), indent=2, sort_keys=True) + "\n"
    with _Replacement(folder / WEIGHTS_FILE) as weights, _Replacement(folder / CONFIG_FILE) as conf:
        save_file(tensors, weights.path, metadata={"format": "pt"})
        conf.path.write_text(text, encoding="utf-8")


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> FoXForCausalLM:
    """The model that a folder in the authors' format holds.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        device: where the weights go.
        dtype: of the weights, whatever the file's is.
        **overrides: fields of ``FoXConfig`` that win over the file's, such as
            ``log_pruning_tolerance=None`` for exact attention.

    Raises:
        FileNotFoundError: when one of the two files is missing; names it.
        ValueError: for a damaged file, an unsupported feature, a config field that is missing or
            wrong, or tensors that do not fit the config; names the file, and what is right.
    """
    folder = Path(folder)
    config = _replace(load_config(folder), overrides)
    path = _existing(folder / WEIGHTS_FILE)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            _check_tensors(
                str(path),
                config,
                {name: tuple(s.get_shape()) for name, s in slices.items()},
                [name for name, s in slices.items() if s.get_dtype() not in _FLOATING],
            )
            # Copies, so that the model does not live on the file's memory map.
            tensors = {n: file.get_tensor(n).to(dtype, copy=True) for n in slices}
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); copy or download it again"
        ) from error
    with torch.device("meta"):
        model = FoXForCausalLM(config)
    model.load_state_dict(tensors, assign=True)
    return model


def load_config(folder: str | os.PathLike[str]) -> FoXConfig:
    """The config of a folder in the authors' format; raises as ``load_pretrained`` does."""
    path = _existing(Path(folder) / CONFIG_FILE)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    _check_supported(path, values)
    names = [field.name for field in dataclasses.fields(FoXConfig)]
    missing = [name for name in names if name not in values and name not in _OPTIONAL]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    try:
        return FoXConfig(**{name: values[name] for name in names if name in values})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _official_dict(config: FoXConfig) -> dict[str, Any]:
    fixed = {key: supported[0] for key, supported in _SUPPORTED.items()}
    return {"model_type": MODEL_TYPE, **fixed, **dataclasses.asdict(config)}


def _check_supported(path: Path, values: dict[str, Any]) -> None:
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{path}: model_type {values.get('model_type')!r} is not supported, only {MODEL_TYPE!r} is"
        )
    for key, supported in _SUPPORTED.items():
        value = values.get(key, supported[0])
        if key == "num_kv_heads" and value == values.get("num_heads"):
            continue
        # JSON's 0 is not its false, though Python finds them equal.
        if not any(type(value) is type(good) and value == good for good in supported):
            listed = " or ".join(json.dumps(good) for good in supported)
            also = " or the same as num_heads" if key == "num_kv_heads" else ""
            raise ValueError(f"{path}: {key} {json.dumps(value)} is not supported, only {listed}{also} is")


def _replace(config: FoXConfig, overrides: dict[str, Any]) -> FoXConfig:
    names = [field.name for field in dataclasses.fields(FoXConfig)]
    unknown = [name for name in overrides if name not in names]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such field of FoXConfig; there are {', '.join(names)}")
    return dataclasses.replace(config, **overrides)


def _check_tensors(
    source: str, config: FoXConfig, shapes: Mapping[str, tuple[int, ...]], not_floating: list[str]
) -> None:
    """One ValueError that lists everything that does not fit, before anything is allocated."""
    # A config that asks for absurdly many layers must not cost the building of them.
    layers = config.num_hidden_layers
    if layers > len(shapes):
        raise ValueError(f"{source} has {len(shapes)} tensors, too few for num_hidden_layers={layers}")
    with torch.device("meta"):
        wanted = {n: tuple(t.shape) for n, t in FoXForCausalLM(config).state_dict().items()}
    problems = [f"missing {n} {wanted[n]}" for n in wanted if n not in shapes]
    problems += [f"unexpected {n} {shapes[n]}" for n in shapes if n not in wanted]
    problems += [
        f"{n} has shape {shapes[n]}, should be {wanted[n]}"
        for n in wanted
        if n in shapes and shapes[n] != wanted[n]
    ]
    problems += [f"{n} does not hold floating-point numbers" for n in not_floating]
    if problems:
        more = len(problems) - _MOST_LISTED
        shown = problems[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else [])
        raise ValueError(f"{source} does not fit its config: " + "; ".join(shown))


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: a checkpoint folder holds {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    return path


class _Replacement:
    """A temporary path beside ``target`` that takes its name on success and vanishes otherwise."""

    def __init__(self, target: Path):
        self.target = target

    def __enter__(self) -> _Replacement:
        handle, name = tempfile.mkstemp(dir=self.target.parent, prefix=f".{self.target.name}.", suffix=".tmp")
        os.close(handle)
        self.path = Path(name)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.path.unlink(missing_ok=True)
            return
        # mkstemp makes files that only their owner may read; give the usual permissions.
        mask = os.umask(0)
        os.umask(mask)
        self.path.chmod(0o666 & ~mask)
        _flush(self.path)
        os.replace(self.path, self.target)
        _flush(self.target.parent)


def _flush(path: Path) -> None:
    """fsync a file's contents, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
