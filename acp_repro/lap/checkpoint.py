"""Folders of pruning autoencoders: config.json, model.safetensors and tokenizer.json, as for T5.

The settings of pruning have their own key in config.json, so that plain transformers reads the same folder as
a T5.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers.utils.hub import cached_file

from ..common import files
from ..common.errors import UsageError
from ..model.third_party import load_model, quiet_transformers
from .blocks import T5
from .config import PruningConfig, PruningError
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
        t5: Any = load_model(transformers.T5ForConditionalGeneration, name_or_folder, **options)
        path = Path(str(cached_file(str(name_or_folder), TOKENIZER_FILE)))
    except (OSError, UsageError) as error:
        raise PruningError(
            f"no T5 with model.safetensors and {TOKENIZER_FILE}: {str(error).strip().splitlines()[0]}; give "
            "a folder that has them, or train from scratch"
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
    with quiet_transformers():
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
        PruningError: there is no such folder, or it contains a checkpoint of another model.
    """
    config = files.read_json(folder / "config.json")
    if not config:
        raise PruningError(
            f"{folder}: holds no config.json of a trained model (missing or damaged); give the folder of one"
        )
    if (settings := config.get(CONFIG_KEY)) is None:
        raise PruningError(
            f"{folder}: a checkpoint of {config.get('model_type', 'another model')} without pruning; "
            "train one with gates, or begin from a T5 with PruningAutoencoder.from_t5"
        )
    try:
        pruning = PruningConfig(**settings)
    except (TypeError, PruningError) as error:
        raise PruningError(f"{folder}: {error}") from error
    try:
        t5: Any = load_model(transformers.T5ForConditionalGeneration, folder)
    except UsageError as error:
        raise PruningError(str(error)) from error
    path = folder / TOKENIZER_FILE
    return t5, pruning, TextTokenizer.read(path) if path.is_file() else None
