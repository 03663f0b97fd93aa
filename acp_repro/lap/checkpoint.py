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
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils.hub import cached_file

from ..common import files
from .blocks import T5
from .settings import PruningConfig, PruningError
from .text import TOKENIZER_FILE, TextTokenizer

CONFIG_KEY = "learnable_attention_pruning"  # in the config.json of T5


def read_t5(name_or_folder: str | Path, **options: Any) -> tuple[T5, TextTokenizer]:
    """A T5 without gates and its tokeniser, from a folder or the Hub.

    Args:
        options: of ``T5ForConditionalGeneration.from_pretrained``.

    Raises:
        PruningError: there is no such T5, it is another model, or it has no ``tokenizer.json``.
    """
    try:
        # Unexpected weights are allowed: a published T5 may hold weights that no T5 reads.
        t5 = _load_weights(name_or_folder, "missing_keys", "mismatched_keys", **options)
        path = Path(name_or_folder) / TOKENIZER_FILE
        if not path.is_file():
            path = Path(str(cached_file(str(name_or_folder), TOKENIZER_FILE)))
    except OSError as error:
        raise PruningError(
            f"{name_or_folder}: no T5 with model.safetensors and {TOKENIZER_FILE} ({_first_line(error)}); "
            "without network give a folder that has them, or train from scratch"
        ) from error
    return t5, TextTokenizer.read(path)


def write_checkpoint(
    folder: Path, t5: T5, state: Mapping[str, Tensor], pruning: PruningConfig, tokenizer: TextTokenizer | None
) -> None:
    """Writes the folder.

    Args:
        state: the T5's weights by name, on the CPU, in their own shapes and dtypes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _silence_transformers():
        t5.save_pretrained(folder, state_dict=dict(state))
    config = json.loads((folder / "config.json").read_text())
    # transformers reads from this key alone whether the head scales.
    config["tie_word_embeddings"] = bool(t5.config.scale_decoder_outputs)
    config[CONFIG_KEY] = dataclasses.asdict(pruning)
    files.write_json(folder / "config.json", config)
    if tokenizer is not None:
        tokenizer.save(folder)


def read_checkpoint(folder: Path) -> tuple[T5, PruningConfig, TextTokenizer | None]:
    """Reads what :func:`write_checkpoint` wrote.

    Raises:
        PruningError: there is no such folder, or it holds a checkpoint of another model.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        settings = config.get(CONFIG_KEY)
    except (OSError, ValueError, AttributeError) as error:
        raise PruningError(f"{folder}: holds no config.json of a trained model ({error})") from error
    if settings is None:
        raise PruningError(
            f"{folder}: a checkpoint of {config.get('model_type', 'another model')} without pruning; "
            "train one with gates, or begin from a T5 with PruningAutoencoder.from_t5"
        )
    try:
        pruning = PruningConfig(**settings)
        t5 = _load_weights(folder, "missing_keys", "unexpected_keys", "mismatched_keys")
    except (OSError, TypeError, PruningError) as error:
        raise PruningError(f"{folder}: {_first_line(error)}") from error
    path = folder / TOKENIZER_FILE
    return t5, pruning, TextTokenizer.read(path) if path.is_file() else None


def _load_weights(name_or_folder: str | Path, *faults: str, **options: Any) -> T5:
    """A T5 whose weights have none of the ``faults``, keys of transformers' loading info.

    transformers itself initialises weights that lack or do not fit, with a long warning.
    """
    options = {"use_safetensors": True, "ignore_mismatched_sizes": True, **options}
    try:
        with _silence_transformers():
            loaded: Any = transformers.T5ForConditionalGeneration.from_pretrained(
                name_or_folder, output_loading_info=True, **options
            )
    except (SafetensorError, ValueError) as error:
        raise OSError(f"model.safetensors cannot be read: {error}") from error
    t5, found = loaded
    # For a weight of another shape, transformers gives both shapes too.
    names = sorted(key if isinstance(key, str) else key[0] for fault in faults for key in found[fault])
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise PruningError(
            f"{name_or_folder}: these weights do not fit the config: {', '.join(names[:3])}{more}"
        )
    return t5


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


@contextlib.contextmanager
def _silence_transformers() -> Iterator[None]:
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
