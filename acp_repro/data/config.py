"""What a suite's YAML says about its data, checked key by key."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from acp_repro.data.files import DataError
from acp_repro.data.tokenizer import SMALLEST_BPE


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, which part of it is held out, and how it becomes tokens.

    Attributes:
        corpus: ``"stdlib"`` (the running Python's own standard library) or ``"text"`` (files).
        path: for ``text``: a file or a folder.
        text_field: the field of ``.jsonl`` files that holds the text.
        heldout: the share of documents held out (0 to less than 1; 0 for none); for ``text``
            also a path or a list of paths, which may lie under ``path``: their documents are
            held out, and no others.
        tokenizer: ``"bytes"``, or ``{"bpe": V}`` for a byte-pair encoding of V ids in all, BOS
            among them, trained on the training documents.

    Raises:
        DataError: names the key, what is wrong with it, and what would be right.
    """

    corpus: str = "stdlib"
    path: str | None = None
    text_field: str = "text"
    heldout: float | str | tuple[str, ...] = 0.05
    tokenizer: str | Mapping[str, int] = "bytes"

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any] | DataConfig) -> DataConfig:
        """The config of a mapping, as YAML gives it; a `DataConfig` comes back as it is."""
        if isinstance(settings, DataConfig):
            return settings
        if not isinstance(settings, Mapping):
            raise DataError(f"data: {settings!r} is not a mapping; write `corpus: stdlib` below it")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                raise DataError(
                    f"{key}: unknown key"
                    + (f"; did you mean {near[0]}?" if near else "")
                    + f" (the keys are {', '.join(known)})"
                )
        return cls(**settings)

    def __post_init__(self) -> None:
        if self.corpus not in ("stdlib", "text"):
            raise DataError(f"corpus: {self.corpus!r} is not known; use stdlib or text")
        if self.corpus == "text" and not (isinstance(self.path, str) and self.path):
            raise DataError(
                f"path: {self.path!r}, but `corpus: text` needs the path of a file or a folder"
            )
        if self.corpus == "stdlib" and self.path is not None:
            raise DataError("path: `corpus: stdlib` takes none; remove it, or set corpus: text")
        if not (isinstance(self.text_field, str) and self.text_field):
            raise DataError(f"text_field: {self.text_field!r} is not the name of a field; use text")
        self._check_heldout()
        self._check_tokenizer()

    def _check_heldout(self) -> None:
        value = self.heldout
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(self, "heldout", value)
        if isinstance(value, str):
            value = (value,)
        if isinstance(value, tuple):
            if not value or not all(isinstance(path, str) and path for path in value):
                raise DataError(
                    f"heldout: {self.heldout!r} is not a list of paths; name at least "
                    "one, or give a share such as 0.05"
                )
            if self.corpus == "stdlib":
                raise DataError("heldout: `corpus: stdlib` takes a share such as 0.05, not paths")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"heldout: {value!r} is neither a share such as 0.05 nor a path")
        elif not 0 <= value < 1:
            raise DataError(f"heldout: {value} is no share; use 0 to less than 1, such as 0.05")

    def _check_tokenizer(self) -> None:
        value = self.tokenizer
        if isinstance(value, Mapping) and list(value) == ["bpe"]:
            size = value["bpe"]
            if isinstance(size, bool) or not isinstance(size, int):
                raise DataError(
                    f"tokenizer: bpe: {size!r} is not a whole number; write {{bpe: 4096}}"
                )
            if not SMALLEST_BPE <= size < 2**32:
                raise DataError(
                    f"tokenizer: bpe: {size} ids cannot be; use {SMALLEST_BPE} (the "
                    "bytes, a merge, BOS) or more, such as 4096"
                )
        elif value != "bytes":
            raise DataError(f"tokenizer: {value!r} is not known; use bytes, or {{bpe: 4096}}")

    @property
    def bpe_size(self) -> int | None:
        """The number of ids of the BPE, or None for bytes."""
        return None if isinstance(self.tokenizer, str) else self.tokenizer["bpe"]

    @property
    def heldout_paths(self) -> tuple[str, ...]:
        """The held-out paths; none where a share is given."""
        if isinstance(self.heldout, str):
            return (self.heldout,)
        return self.heldout if isinstance(self.heldout, tuple) else ()
