"""Folders of pruning autoencoders: config.json, model.safetensors and tokenizer.json, as T5 has them.

The settings of pruning stand in config.json under a key of their own, so that plain transformers reads the
same folder as a T5.
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

from .settings import PruningConfig, PruningError
from .text import TOKENIZER_FILE, TextTokenizer

CONFIG_KEY = "learnable_attention_pruning"  # in the config.json of T5


def need_transformers() -> ModuleType:
    """The library.

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
        PruningError: there is no such T5, or it has no ``tokenizer.json``.
    """
    transformers = need_transformers()
    try:
        with _no_bars(transformers):
            t5 = transformers.T5ForConditionalGeneration.from_pretrained(
                name_or_folder, use_safetensors=True, **options
            )
        path = Path(name_or_folder) / TOKENIZER_FILE
        if not path.is_file():
            path = Path(transformers.utils.cached_file(str(name_or_folder), TOKENIZER_FILE))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PruningError(
            f"{name_or_folder}: no T5 with model.safetensors and {TOKENIZER_FILE} ({reason}); without "
            "network give a folder that has them, or train from scratch"
        ) from error
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
        state: the T5's weights by name, on the CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _no_bars(need_transformers()):
        t5.save_pretrained(folder, state_dict=dict(state))
    config = json.loads((folder / "config.json").read_text())
    # transformers reads from this key alone whether the head scales.
    config["tie_word_embeddings"] = bool(t5.config.scale_decoder_outputs)
    config[CONFIG_KEY] = dataclasses.asdict(pruning)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)


def read(folder: Path) -> tuple[nn.Module, PruningConfig, TextTokenizer | None]:
    """What :func:`write` wrote.

    Raises:
        PruningError: no such folder, or a checkpoint of another model.
    """
    config = _read_config(folder)
    transformers = need_transformers()
    try:
        with _no_bars(transformers):
            t5, found = transformers.T5ForConditionalGeneration.from_pretrained(
                folder, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise PruningError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    wrong = [*found["missing_keys"], *found["unexpected_keys"]]
    wrong += [str(key) for key in found.get("mismatched_keys", ())]
    if wrong:
        raise PruningError(f"{folder}: model.safetensors is not of this config.json: {', '.join(wrong[:3])}")
    path = folder / TOKENIZER_FILE
    tokenizer = _read_tokenizer(path) if path.is_file() else None
    return t5, PruningConfig.from_dict(config[CONFIG_KEY]), tokenizer


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise PruningError(f"{folder}: holds no config.json; give the folder of a trained model") from None
    except (OSError, ValueError) as error:
        raise PruningError(f"{folder}/config.json: cannot be read ({error})") from error
    if CONFIG_KEY not in config:
        raise PruningError(
            f"{folder}: a checkpoint of {config.get('model_type', 'another model')} without pruning; "
            "train one with gates, or begin from a T5 with PruningAutoencoder.from_t5"
        )
    return config


def _read_tokenizer(path: Path) -> TextTokenizer:
    return TextTokenizer(path.read_text(encoding="utf-8"), str(path))


@contextlib.contextmanager
def _no_bars(transformers: ModuleType) -> Iterator[None]:
    """Without progress bars for files that are read in a moment."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
