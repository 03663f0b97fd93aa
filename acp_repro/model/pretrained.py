"""Checkpoints in the authors' format: ``config.json`` and ``model.safetensors`` in one folder.

Tensor names are the official ones, so files move in both directions. Loading never unpickles data and never
runs code of a checkpoint. Reading and writing weights requires ``safetensors``.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acp_repro.common.artifacts import identify_run, open_or_explain, read_object
from acp_repro.common.files import replacing

from .config import ROPE_BASE, FoXConfig

MODEL_TYPE = "forgetting_transformer-project_fox"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
# The weights folder and the settings file of a run folder of this project.
RUN_MODEL_FOLDER, RUN_FILE = "model", "run.json"

# Official keys for unsupported features, with the supported values. The first value is written, and is the
# default for a missing key.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "window_size": (None,),
    "tie_word_embeddings": (False,),
    "num_kv_heads": (None,),  # or num_heads, see _check_supported
    "fgate_type": ("full",),
    "attention_bias": (False,),
    "elementwise_affine": (True,),
    "hidden_act": ("swish", "silu"),
    "ogate_act": ("sigmoid",),
}
_SUPPORTED_WITH_ROPE = _SUPPORTED | {"fgate_type": ("none",), "rope_base": (ROPE_BASE, int(ROPE_BASE))}
# Config fields that a file may omit, because only the default is valid.
_OPTIONAL = ("intermediate_size", "max_position_embeddings", "initializer_range", "use_rope", "fuse_training")
_FLOATING = ("F64", "F32", "F16", "BF16")


def read_checkpoint(
    model_class: type[nn.Module],
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> tuple[FoXConfig, dict[str, Tensor]]:
    """Config and tensors by name, as ``from_pretrained`` reads them; a dtype of None keeps the files'."""
    folder = find_folder(folder)
    config = _override(_read_config(folder / CONFIG_FILE), overrides)
    paths = weight_files(folder)
    check_sum(folder)
    safetensors = _import_safetensors()
    with contextlib.ExitStack() as stack:
        files = {}
        for path in paths:
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="pt", device=str(device)))
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{path} is not a complete safetensors file ({error}); copy or download it again"
                ) from error
            files |= dict.fromkeys(file.keys(), file)
        slices = {name: file.get_slice(name) for name, file in files.items()}
        check_tensors(
            model_class,
            str(paths[0] if len(paths) == 1 else folder),
            config,
            {name: tuple(s.get_shape()) for name, s in slices.items()},
            [name for name, s in slices.items() if s.get_dtype() not in _FLOATING],
        )
        # Copies, so that the model does not depend on the memory map of the file.
        tensors = {name: file.get_tensor(name).to(dtype, copy=True) for name, file in files.items()}
    check_finite(folder, tensors)
    return config, tensors


def weight_files(folder: Path) -> list[Path]:
    """``model.safetensors``, or the shards that its index names."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return [_require_file(folder / WEIGHTS_FILE)]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [_require_file(folder / name) for name in sorted(Path(name).name for name in names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error!r}); copy or download it again") from error


def check_sum(folder: Path) -> None:
    """Raises ValueError if the weights are not those of our own ``done.json``, if there is one, or of another
    run than ``run.json``."""
    real = folder.resolve()
    of_run = real.name == RUN_MODEL_FOLDER and (real.parent / RUN_FILE).is_file()
    done = (real.parent if of_run else real) / "done.json"
    if done.is_file() and (folder / WEIGHTS_FILE).is_file():
        inputs = identify_run(read_object(real.parent / RUN_FILE)) if of_run else None
        open_or_explain(folder / WEIGHTS_FILE, inputs, manifest=done, remedy="copy both again")


def check_finite(source: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError if tensors contain NaN or infinity; tensors on ``meta`` are skipped."""
    bad = [name for name, x in tensors.items() if not (x.is_meta or bool(x.float().isfinite().all()))]
    if bad:
        raise ValueError(f"{source}: {bad[0]} ({len(bad)} in all) holds NaN or infinity; copy it again")


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` as the official code reads them.

    Each file is written under another name, flushed to disk and renamed. A reader therefore never sees half a
    file, also after a crash.

    Args:
        model: a ``FoXForCausalLM`` (compiled or not).
        folder: created if it does not exist.
        state_dict: the tensors to write, for a sharded model. Names and shapes must be those of the model.
            Dtypes are kept.

    Raises:
        ValueError: state_dict does not fit the model's config; the message lists the tensors.
    """
    whole: Any = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
    tensors = whole.state_dict() if state_dict is None else dict(state_dict)
    check_tensors(
        type(whole),
        "state_dict",
        whole.config,
        {name: tuple(t.shape) for name, t in tensors.items()},
        [name for name, t in tensors.items() if not t.is_floating_point()],
    )
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file = _import_safetensors().torch.save_file
    text = json.dumps(config_to_official(whole.config), indent=2, sort_keys=True) + "\n"
    with replacing(Path(folder) / WEIGHTS_FILE) as weights, replacing(Path(folder) / CONFIG_FILE) as config:
        save_file(tensors, weights, metadata={"format": "pt"})
        config.write_bytes(text.encode())


def find_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder with ``config.json``: ``folder`` itself, or the ``model/`` of a run folder."""
    path = Path(folder)
    if (path / CONFIG_FILE).is_file():
        return path
    inside = path / RUN_MODEL_FOLDER
    if (inside / CONFIG_FILE).is_file():
        return inside
    if (path / RUN_FILE).is_file():
        raise FileNotFoundError(f"{path} is a run that is not finished: finish its training first")
    return path  # load_config reports the missing file


def load_config(folder: str | os.PathLike[str]) -> FoXConfig:
    """The config of a checkpoint folder or a run folder.

    Raises:
        FileNotFoundError, ValueError: as ``FoXForCausalLM.from_pretrained`` does.
    """
    return _read_config(find_folder(folder) / CONFIG_FILE)


def _read_config(path: Path) -> FoXConfig:
    _require_file(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return config_from_official(values, path)


def config_from_official(values: Mapping[str, Any], path: str | os.PathLike[str]) -> FoXConfig:
    """The config that the keys of an official ``config.json`` describe; other keys are ignored."""
    _check_supported(path, values)
    names = [field.name for field in dataclasses.fields(FoXConfig)]
    missing = [name for name in names if name not in values and name not in _OPTIONAL]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    try:
        return FoXConfig(**{name: values[name] for name in names if name in values})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def config_to_official(config: FoXConfig) -> dict[str, Any]:
    """The contents of the official ``config.json``: the fields, and what is the same for every FoX here."""
    supported = _SUPPORTED_WITH_ROPE if config.use_rope else _SUPPORTED
    fixed = {key: allowed[0] for key, allowed in supported.items()}
    fields = dataclasses.asdict(config)
    del fields["fuse_training"]  # a choice of kernels, not a property of the model
    return {"model_type": MODEL_TYPE, **fixed, **fields}


def _check_supported(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{path}: model_type {values.get('model_type')!r} is not supported, only {MODEL_TYPE!r} is"
        )
    table = _SUPPORTED_WITH_ROPE if values.get("use_rope", False) else _SUPPORTED
    for key, supported in table.items():
        value = values.get(key, supported[0])
        if key == "num_kv_heads" and value == values.get("num_heads"):
            continue
        # JSON distinguishes 0 from false, but in Python they are equal.
        if not any(type(value) is type(good) and value == good for good in supported):
            listed = " or ".join(json.dumps(good) for good in supported)
            also = " or the same as num_heads" if key == "num_kv_heads" else ""
            raise ValueError(f"{path}: {key} {json.dumps(value)} is not supported, only {listed}{also} is")


def _override(config: FoXConfig, overrides: dict[str, Any]) -> FoXConfig:
    names = [field.name for field in dataclasses.fields(FoXConfig)]
    unknown = [name for name in overrides if name not in names]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no such field of FoXConfig; its fields are {', '.join(names)}"
        )
    return dataclasses.replace(config, **overrides)


def check_tensors(
    model_class: type[nn.Module],
    source: str,
    config: FoXConfig,
    shapes: Mapping[str, tuple[int, ...]],
    not_floating: list[str],
) -> None:
    """Raises one ValueError of all names, shapes and dtypes that do not fit, before anything is allocated."""
    # Checked first, because a model with absurdly many layers would take long to build.
    layers = config.num_hidden_layers
    if layers > len(shapes):
        raise ValueError(f"{source} has {len(shapes)} tensors, too few for num_hidden_layers={layers}")
    with torch.device("meta"):
        wanted = {n: tuple(t.shape) for n, t in model_class(config).state_dict().items()}
    problems = [f"missing {n} {wanted[n]}" for n in wanted if n not in shapes]
    problems += [f"unexpected {n} {shapes[n]}" for n in shapes if n not in wanted]
    problems += [
        f"{n} has shape {shapes[n]}, should be {wanted[n]}"
        for n in wanted
        if n in shapes and shapes[n] != wanted[n]
    ]
    problems += [f"{n} does not hold floating-point numbers" for n in not_floating]
    if problems:
        raise ValueError(f"{source} does not fit its config: " + "; ".join(problems[:40]))


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: a checkpoint folder on this machine holds {CONFIG_FILE} and {WEIGHTS_FILE} "
            "or its shards (files that have to be unpickled are not read)"
        )
    return path


def _import_safetensors():
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "reading and writing checkpoints needs safetensors: `pip install safetensors`"
        ) from error
    return safetensors
