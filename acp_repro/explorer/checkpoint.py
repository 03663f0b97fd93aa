"""A checkpoint folder with config, weights and tokenizer. Opening a folder does not import torch."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acp_repro import model
from acp_repro.common.artifacts import read_object
from acp_repro.common.errors import UsageError, usage_errors
from acp_repro.common.files import read_json

if TYPE_CHECKING:
    import torch

    from acp_repro.model.tokenizer import Tokenizer

# Names of the BOS token in tokenizers of other projects; GPT-2's is the first choice.
_BOS_NAMES = ("<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "[BOS]")


def is_fox(path: str) -> bool:
    """Whether ``path`` is a FoX checkpoint, and not a folder of another model or a name on the Hub."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return Path(path).parent.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)
    # A damaged file counts as FoX, because the error of the FoX loader names the damage.
    return "forgetting" in read_json(file).get("model_type", "forgetting")


class Checkpoint:
    """A folder in the authors' format, or a run folder ``runs/SUITE/RUN``, whose weights are in ``model/``.

    Attributes:
        folder: the folder with ``config.json`` and ``model.safetensors``.

    Raises:
        UsageError: the files do not exist. UsageError is a ValueError; attributes raise it too.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        folders = [folder for folder in (path, path / "model") if (folder / "config.json").is_file()]
        if not folders:
            if (path / "run.json").is_file():
                raise UsageError(
                    f"{path} contains no weights, because its training run has not finished; resume the run"
                )
            run = min((file.parent for file in path.glob("*/run.json")), default="runs/cpu/NAME")
            wrong = "contains no config.json" if path.exists() else "does not exist"
            raise UsageError(
                f"{path} {wrong}; pass a folder with config.json and model.safetensors, or a run folder such "
                f"as {run}"
            )
        self.folder = folders[0]

    @property
    def name(self) -> str:
        """The name of the run or the folder."""
        folder = self.folder.resolve()
        return folder.parent.name if folder.name == "model" else folder.name

    @functools.cached_property
    def run(self) -> dict[str, Any] | None:
        """The content of the run's ``run.json``; None for a model without a run of this project."""
        folder = self.folder.resolve()
        file = folder.parent / "run.json"
        # Only a folder named "model" contains weights of a run; other run.json files belong to other
        # programs.
        return read_object(file) if folder.name == "model" and file.is_file() else None

    @property
    def context_length(self) -> int | None:
        """The number of tokens of the run's training sequences; None in the authors' format."""
        return None if self.run is None else self.run["settings"]["context_length"]

    @functools.cached_property
    @usage_errors()
    def config(self) -> model.FoXConfig:
        """The config of the model; :class:`UsageError` if the model is not a FoX."""
        return model.load_config(self.folder)

    @usage_errors()
    def load(self, device: torch.device | str = "cpu", **options: Any) -> model.FoXForCausalLM:
        """Loads the model; options and errors are those of :func:`acp_repro.load_pretrained`."""
        return model.load_pretrained(self.folder, device=device, **options)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in ``tokenizer.json`` next to the weights, or the byte tokenizer if the vocabulary
        size is 257; otherwise None.

        Raises:
            UsageError: the file is damaged.
            ImportError: the library `tokenizers` is not installed.
        """
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return model.ByteTokenizer() if self.config.vocab_size == model.ByteTokenizer.vocab_size else None
        try:
            text = path.read_text(encoding="utf-8")
            own = model.BPETokenizer(text)
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
        if own.vocab_size == self.config.vocab_size:
            return own
        return model.BPETokenizer(text, *[name for name in _BOS_NAMES if name in own][:1])

    def require_tokenizer(self) -> Tokenizer:
        """:attr:`tokenizer`; :class:`UsageError` if it is None."""
        if self.tokenizer is None:
            raise UsageError(
                f"{self.folder} has {self.config.vocab_size} token ids and no tokenizer.json; copy the "
                "model's tokenizer.json to that folder"
            )
        return self.tokenizer
