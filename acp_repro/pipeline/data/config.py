"""The data settings of a suite's YAML, checked key by key. Imports the standard library only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from acp_repro.common.errors import did_you_mean
from acp_repro.pipeline.data import corpora  # noqa: F401  registers them
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.registry import CORPORA, CorpusFunction, find_corpus
from acp_repro.pipeline.data.sources import Source

DEFAULT_HELDOUT = 0.05
BYTES_VOCAB_SIZE = 256 + 1  # every byte, BOS
SMALLEST_BPE = 256 + 2  # every byte, one merge, BOS
GPT2_VOCAB_SIZE = 50257


@dataclass(frozen=True)
class CorpusConfig:
    """Which text: the first settings of every paper's data. Each paper adds ``options``, a mapping.

    Attributes:
        corpus: the name of a function of `corpora`, or of another package.
        path: what that function reads: a file, a folder, a dataset.
    """

    # Fields of a subclass that are options of some corpora.
    NAMED: ClassVar[tuple[str, ...]] = ()
    # For a caller that checks the fields' types with pydantic, which this module does not import. An unknown
    # key is an error there too.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    corpus: str
    path: str | list[str] | None = None

    @property
    def function(self) -> CorpusFunction:
        """The function that gives the texts."""
        return find_corpus(self.corpus)

    def __post_init__(self) -> None:
        function = self.function
        if isinstance(self.path, list | tuple) and function.several:
            object.__setattr__(self, "path", tuple(self.path))
        function.check(self.path, self.arguments())
        for of in dataclasses.fields(self):
            is_taken = of.name not in self.NAMED or of.name in function.options
            if not is_taken and getattr(self, of.name) != of.default:
                takers = [name for name, other in CORPORA.items() if of.name in other.options]
                raise DataError(
                    f"{of.name}: is for `corpus: {' or '.join(takers)}`; remove it, or set "
                    f"corpus: {takers[0]}"
                )

    def arguments(self) -> dict[str, Any]:
        """The options of the function, as the settings have them."""
        given = {name: getattr(self, name) for name in self.NAMED if name in self.function.options}
        return {name: value for name, value in given.items() if value is not None} | self.options

    @contextlib.contextmanager
    def errors_at(self, place: str) -> Iterator[None]:
        """Inside, an error of the corpus begins with ``place``, a suite's file and the key of these settings.

        Raises:
            DataError: with a key of the settings, ``FILE: data.path: ...``; else ``FILE: data: ...``.
        """
        try:
            yield
        except DataError as error:
            said = str(error)
            key, own = said.partition(": ")[0], [of.name for of in dataclasses.fields(self)]
            if key not in own and key in self.function.options:
                said = f"options.{said}"
            is_key = said.startswith("options.") or key in own
            raise DataError(f"{place}{'.' if is_key else ': '}{said}") from error

    def source(self, cache: Path | None = None) -> Source:
        """The corpus, not read yet; see `CorpusFunction.open`."""
        return self.function.open(self.path, self.arguments(), cache)


@dataclass(frozen=True)
class DataConfig(CorpusConfig):
    """Which text, which part of it is held out, and how it becomes tokens.

    Attributes:
        corpus, path: see `CorpusConfig`. For ``text`` a list of paths (kept as a tuple) is read one after the
            other.
        text_field: the field of ``.jsonl`` files, or of the dataset, that holds the text.
        heldout: the share of documents held out (0 to less than 1), by default 0.05. Of a single document it
            is the last part, cut where a paragraph ends. With 0 nothing is held out, so nothing can be
            measured on this text (`require_heldout`). For ``text`` also a path or a list of paths (kept as a
            tuple), which may be under ``path``: exactly their documents are held out. None for
            ``longcrawl64``, which is already split.
        tokenizer: ``"bytes"`` (the default); ``{"bpe": V}`` for a byte-pair encoding of V ids in all, BOS
            among them, trained on the training documents; ``"gpt2"`` for GPT-2's; or ``{"file": PATH}`` for a
            ``tokenizer.json`` that exists. ``longcrawl64`` already holds GPT-2 ids: there it is ``"gpt2"`` or
            a file with GPT-2's, used to turn ids into text.
        config: for ``hf``: the dataset's configuration, if it has several.
        split: for ``hf``: the dataset's split that is read, by default ``"train"``; ``heldout`` divides it.
        max_documents: for ``hf``: how many documents are fetched, from the first one on.
        options: other options of the corpus's function.

    Raises:
        DataError: the message names the key, what is wrong with it, and what would be right.
    """

    NAMED = ("text_field", "config", "split", "max_documents")

    corpus: str = "stdlib"
    text_field: str = "text"
    heldout: float | str | list[str] | None = None
    tokenizer: str | dict[str, Any] | None = None
    config: str | None = None
    split: str | None = None
    max_documents: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any] | DataConfig) -> DataConfig:
        """The config of a mapping, as YAML gives it; a `DataConfig` is returned unchanged.

        Raises:
            DataError: an unknown key, or a value that is not allowed.
        """
        if isinstance(settings, DataConfig):
            return settings
        if not isinstance(settings, Mapping):
            raise DataError(f"data: {settings!r} is not a mapping; write `corpus: stdlib` below it")
        known = [of.name for of in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                near = did_you_mean(key, known)
                raise DataError(f"{key}: unknown key{near} (the keys are {', '.join(known)})")
        return cls(**settings)

    def __post_init__(self) -> None:
        if not (isinstance(self.text_field, str) and self.text_field):
            raise DataError(f"text_field: {self.text_field!r} is not the name of a field; use text")
        super().__post_init__()
        if self.corpus == "longcrawl64":
            self._set("tokenizer", "gpt2")
            if self.heldout is not None:
                raise DataError("heldout: `corpus: longcrawl64` holds out heldout.zarr; remove the key")
        else:
            self._set("tokenizer", "bytes")
            self._set("heldout", DEFAULT_HELDOUT)
            self._check_heldout()
        self._check_tokenizer()
        self._check_hf()

    def _set(self, name: str, default: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, default)

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
            if self.corpus != "text":
                raise DataError(f"heldout: `corpus: {self.corpus}` takes a share such as 0.05, not paths")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"heldout: {value!r} is neither a share such as 0.05 nor a path")
        elif not 0 <= value < 1:
            raise DataError(f"heldout: {value} is not a share; use 0 to less than 1, such as 0.05")

    def _check_tokenizer(self) -> None:
        value = self.tokenizer
        kind = next(iter(value)) if isinstance(value, Mapping) and len(value) == 1 else value
        if kind == "bpe" and isinstance(value, Mapping):
            size = value["bpe"]
            if isinstance(size, bool) or not isinstance(size, int):
                raise DataError(f"tokenizer: bpe: {size!r} is not a whole number; write {{bpe: 4096}}")
            if not SMALLEST_BPE <= size < 2**32:
                raise DataError(
                    f"tokenizer: bpe: {size} ids are too few; use {SMALLEST_BPE} (the "
                    "bytes, a merge, BOS) or more, such as 4096"
                )
        elif kind == "file" and isinstance(value, Mapping):
            if not (isinstance(value["file"], str) and value["file"]):
                raise DataError(f"tokenizer: file: {value['file']!r} is not a path; name a tokenizer.json")
        elif value not in ("bytes", "gpt2"):
            raise DataError(
                f"tokenizer: {value!r} is not known; use bytes, gpt2, {{bpe: 4096}} or {{file: PATH}}"
            )
        if self.corpus == "longcrawl64" and kind not in ("gpt2", "file"):
            raise DataError(f"tokenizer: {value!r}, but `corpus: longcrawl64` is GPT-2 ids; remove the key")

    def _check_hf(self) -> None:
        if self.corpus != "hf":
            return
        self._set("split", "train")
        for name in ("config", "split"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise DataError(f"{name}: {value!r} is not a name; write for example {name}: train")
        most = self.max_documents
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise DataError(
                f"max_documents: {most!r}, but `corpus: hf` needs a number of documents to "
                "fetch, such as 10_000"
            )

    def arguments(self) -> dict[str, Any]:
        is_left_out = self.corpus == "text" and self.heldout_paths
        return super().arguments() | ({"exclude": self.heldout_paths} if is_left_out else {})

    @property
    def bpe_size(self) -> int | None:
        """The number of ids of a BPE that is trained here, or None."""
        return self.tokenizer.get("bpe") if isinstance(self.tokenizer, Mapping) else None

    @property
    def tokenizer_file(self) -> str | None:
        """The ``tokenizer.json`` that is given, or None."""
        return self.tokenizer.get("file") if isinstance(self.tokenizer, Mapping) else None

    @property
    def vocab_size(self) -> int | None:
        """The number of ids if the settings determine it; None for ``{file: PATH}``."""
        if self.corpus == "longcrawl64" or self.tokenizer == "gpt2":
            return GPT2_VOCAB_SIZE
        return self.bpe_size or (BYTES_VOCAB_SIZE if self.tokenizer == "bytes" else None)

    def require_heldout(self) -> None:
        """Checks that some text is held out, before anything is measured.

        Raises:
            DataError: the settings hold out nothing.
        """
        if self.heldout == 0 and self.corpus != "longcrawl64":
            raise DataError(
                f"heldout: {self.heldout} holds out no text to measure on; set a share such as "
                f"{DEFAULT_HELDOUT}, or remove the key"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The files or folders of ``text`` that ``path`` names."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path or ())

    @property
    def heldout_paths(self) -> tuple[str, ...]:
        """The held-out paths; empty if a share is given."""
        if isinstance(self.heldout, str):
            return (self.heldout,)
        return self.heldout if isinstance(self.heldout, tuple) else ()
