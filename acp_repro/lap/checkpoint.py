"""Folders of pruning autoencoders: config.json, model.safetensors and tokenizer.json, as for T5.

The settings of pruning have their own key in config.json, so that plain transformers reads the same folder as
a T5.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..common import files
from .settings import PruningConfig, PruningError
from .text import TOKENIZER_FILE, TextTokenizer

CONFIG_KEY = "learnable_attention_pruning"  # in the config.json of T5


def need_transformers() -> ModuleType:
    """The library transformers.

    Raises:
        PruningError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise PruningError(
            "this needs the library `transformers` (5 or newer): pip install -e '.[lap]'"
        ) from None
    return transformers


def read_t5(name_or_folder: str | Path, **options: Any) -> tuple[nn.Module, TextTokenizer]:
    """A T5 without gates and its tokeniser, from a folder or the Hub.

    Args:
        options: of ``T5ForConditionalGeneration.from_pretrained``.

    Raises:
        PruningError: there is no such T5, it is another model, or it has no ``tokenizer.json``.
    """
    transformers = need_transformers()
    try:
        t5, found = _load(name_or_folder, **options)
        path = Path(name_or_folder) / TOKENIZER_FILE
        if not path.is_file():
            path = Path(transformers.utils.cached_file(str(name_or_folder), TOKENIZER_FILE))
    except (OSError, ValueError) as error:
        raise PruningError(
            f"{name_or_folder}: no T5 with model.safetensors and {TOKENIZER_FILE} ({_first_line(error)}); "
            "without network give a folder that has them, or train from scratch"
        ) from error
    # Unexpected weights are allowed: a published T5 may hold weights that no T5 reads.
    if wrong := _names(found, "missing_keys", "mismatched_keys"):
        raise PruningError(f"{name_or_folder}: not the weights of a T5, these lack or do not fit: {wrong}")
    return t5, _read_tokenizer(path)


def write(
    folder: Path,
    t5: nn.Module,
    state: Mapping[str, Tensor],
    pruning: PruningConfig,
    tokenizer: TextTokenizer | None,
) -> None:
    """Writes the folder.

    Args:
        state: the T5's weights by name, on the CPU, in their own shapes and dtypes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _quiet(need_transformers()):
        t5.save_pretrained(folder, state_dict=dict(state))
    config = json.loads((folder / "config.json").read_text())
    # transformers reads from this key alone whether the head scales.
    config["tie_word_embeddings"] = bool(t5.config.scale_decoder_outputs)
    config[CONFIG_KEY] = dataclasses.asdict(pruning)
    files.write_json(folder / "config.json", config)
    if tokenizer is not None:
        tokenizer.save(folder)


def read(folder: Path) -> tuple[nn.Module, PruningConfig, TextTokenizer | None]:
    """Reads what :func:`write` wrote.

    Raises:
        PruningError: there is no such folder, or it holds a checkpoint of another model.
    """
    config = _read_config(folder)
    try:
        pruning = PruningConfig.from_dict(config[CONFIG_KEY])
    except PruningError as error:
        raise PruningError(f"{folder}/config.json: {error}") from None
    try:
        t5, found = _load(folder)
    except (OSError, ValueError) as error:
        raise PruningError(f"{folder}: {_first_line(error)}") from error
    if wrong := _names(found, "missing_keys", "unexpected_keys", "mismatched_keys"):
        raise PruningError(f"{folder}: model.safetensors does not fit config.json: {wrong}")
    path = folder / TOKENIZER_FILE
    return t5, pruning, _read_tokenizer(path) if path.is_file() else None


def _load(name_or_folder: str | Path, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A T5, and the weights that its file lacks, has too many, or has in another shape.

    Raises:
        OSError, ValueError: there is no such T5, or its file cannot be read.
    """
    transformers = need_transformers()
    from safetensors import SafetensorError

    # transformers initialises weights that lack or do not fit, with a long warning; here it is an error.
    options = {"use_safetensors": True, "ignore_mismatched_sizes": True, **options}
    try:
        with _quiet(transformers):
            return transformers.T5ForConditionalGeneration.from_pretrained(
                name_or_folder, output_loading_info=True, **options
            )
    except SafetensorError as error:
        raise ValueError(f"model.safetensors cannot be read: {error}") from error


def _names(found: Mapping[str, Any], *kinds: str) -> str:
    """The first three weights of some kinds; empty if there are none."""
    keys = (key for kind in kinds for key in found[kind])
    # For a weight of another shape, both shapes are shown too.
    names = sorted(key if isinstance(key, str) else key[0] for key in keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise PruningError(f"{folder}: holds no config.json; give the folder of a trained model") from None
    except (OSError, ValueError) as error:
        raise PruningError(f"{folder}/config.json: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise PruningError(f"{folder}/config.json: not the settings of a model")
    if CONFIG_KEY not in config:
        raise PruningError(
            f"{folder}: a checkpoint of {config.get('model_type', 'another model')} without pruning; "
            "train one with gates, or begin from a T5 with PruningAutoencoder.from_t5"
        )
    return config


def _read_tokenizer(path: Path) -> TextTokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PruningError(f"{path}: cannot be read ({error})") from error
    return TextTokenizer(text, str(path))


@contextlib.contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Without warnings, and without progress bars for files that are read fast."""
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
