"""Strict loading of third-party models with transformers.

Only safetensors are read, no code of a folder runs, and a weight that is missing, unexpected, damaged or not
finite is an error instead of a warning.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from acp_repro.common.errors import UsageError, is_out_of_memory, usage_errors

from .pretrained import INDEX_FILE, WEIGHTS_FILE, check_finite

MOST_LAYERS = 1000
# Parameters that a config may request beyond two per byte of the files: room for a new head.
SPARE_PARAMETERS = 10**8
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def load_config(source: str | Path, **options: Any) -> Any:
    """The config of a model that transformers supports, from a folder or the Hub.

    Args:
        options: of transformers' ``from_pretrained``, such as ``revision`` or keys of the config.

    Raises:
        UsageError: there is no such config, it needs code of its own, or it has an implausible number of
            layers.
    """
    with _one_line_errors(source):
        path = cached_file(str(source), "config.json", **_only_hub(options))
        text = Path(str(path)).read_text(encoding="utf-8")
        # Checked in the JSON text, because some config classes build a list with one entry per layer.
        for name, value in re.findall(r'"(\w*layers?)"\s*:\s*(\d+)', text):
            if float(value) > MOST_LAYERS:
                raise UsageError(f"{path}: {name} is {value}, over {MOST_LAYERS}; copy the file again")
        return transformers.AutoConfig.from_pretrained(str(source), trust_remote_code=False, **options)


def load_model(auto: Any, source: str | Path, *, new_head: bool = False, **options: Any) -> Any:
    """A model with exactly the weights of a folder or of a repository on the Hub.

    Args:
        auto: an ``AutoModelFor...``, or a class of models.
        new_head: the files may contain another head than ``auto`` has, or none. Weights of the head and of
            the pooler may then be missing, and are initialised, or unexpected.
        options: of transformers' ``from_pretrained``, such as ``dtype``.

    Raises:
        UsageError: a file is missing or truncated, or weights are missing, unexpected, of another shape or
            kind of dtype, or not finite. The message is one line and names the folder and the tensor.
    """
    config = load_config(source, **_only_hub(options))
    with _one_line_errors(source):
        dtypes = _read_dtypes(str(source), auto, config, _only_hub(options))
        forced: dict[str, Any] = {
            "trust_remote_code": False,
            "use_safetensors": True,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # the info lists them, and they are an error below
        }
        model, info = auto.from_pretrained(str(source), **{**options, **forced})
    check_loaded(source, model, info, dtypes, new_head)
    return model


def check_loaded(
    source: str | Path,
    model: Any,
    info: dict[str, Any],
    dtypes: dict[str, str] | None = None,
    new_head: bool = False,
) -> None:
    """Raises :class:`UsageError` unless ``model`` has exactly the weights of its files, all of them finite.

    Args:
        info: of ``from_pretrained`` with ``output_loading_info`` and ``ignore_mismatched_sizes``.
        dtypes: of the tensors in the files, by name; integers must not become floating-point weights.
        new_head: see :func:`load_model`.
    """
    prefix, dtypes = f"{model.base_model_prefix}.", dtypes or {}
    # Unexpected weights are named as in the file, which has no prefix if it contains only an encoder.
    own_prefix = "" if any(name.startswith(prefix) for name in dtypes) else prefix
    floating = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}

    def is_head(name: str) -> bool:
        return new_head and ("pooler" in name or not name.startswith(prefix))

    problems = [
        *(f"missing {name}" for name in sorted(info["missing_keys"]) if not is_head(name)),
        *(f"unexpected {name}" for name in sorted(info["unexpected_keys"]) if not is_head(own_prefix + name)),
        *(
            f"{name} has shape {tuple(found)}, should be {tuple(wanted)}"
            for name, found, wanted in sorted(info["mismatched_keys"])
        ),
        *(
            f"{name} has dtype {dtype}, should be floating-point"
            for name, dtype in dtypes.items()
            if not dtype.startswith(("F", "BF"))
            and floating & {name, prefix + name, name.removeprefix(prefix)}
        ),
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UsageError(f"{source}: weights do not fit the config: {'; '.join(problems[:3])}{more}")
    with usage_errors():
        check_finite(source, model.state_dict())


def _only_hub(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in _HUB_OPTIONS}


def _read_dtypes(source: str, auto: Any, config: Any, hub: dict[str, Any]) -> dict[str, str]:
    """The dtype of each tensor in the files of weights.

    Raises:
        UsageError: a file is truncated, or the config has more parameters than the files can contain.
    """
    find = functools.partial(cached_file, source, _raise_exceptions_for_missing_entries=False, **hub)
    path = find(WEIGHTS_FILE) or find(INDEX_FILE)
    if path is None:
        raise UsageError(f"{source} has no file named {WEIGHTS_FILE}; convert its weights to safetensors")
    paths: Any = [path] if path.endswith(WEIGHTS_FILE) else get_checkpoint_shard_files(source, path, **hub)[0]
    dtypes = {}
    for path in paths:
        with _one_line_errors(path), safe_open(path, framework="pt") as file:
            dtypes |= {name: file.get_slice(name).get_dtype() for name in sorted(file.keys())}
    with torch.device("meta"):
        shape = auto.from_config(config) if hasattr(auto, "from_config") else auto(config)
    wanted = sum(weight.numel() for weight in shape.parameters())
    size = sum(Path(path).stat().st_size for path in paths)
    if wanted > 2 * size + SPARE_PARAMETERS:
        raise UsageError(
            f"{source}: config.json asks for {wanted:,} parameters, but the weights have {size:,} bytes; "
            "copy the folder again"
        )
    return dtypes


@contextlib.contextmanager
def _one_line_errors(source: str | Path) -> Iterator[None]:
    """Turns every error of transformers about ``source`` into a :class:`UsageError` with its first line."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:  # a damaged config.json can raise any exception
        if isinstance(error, UsageError) or is_out_of_memory(error):
            raise
        raise UsageError(
            f"{source} cannot be read: {(str(error).strip() or repr(error)).splitlines()[0]}; give a "
            "complete folder or a name on the Hub, whose code is never run"
        ) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' warnings, and without its progress bars for files that are read fast."""
    logging = transformers.utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
