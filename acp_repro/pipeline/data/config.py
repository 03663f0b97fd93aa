"""The data settings of a suite file. pydantic validates each key, and this module combinations of keys."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from acp_repro.common.bounds import Count, Must, within
from acp_repro.pipeline.data.corpora import CORPORA, CorpusFunction, find_corpus
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Source

DEFAULT_HELDOUT = 0.05
BYTES_VOCAB_SIZE = 256 + 1  # every byte, BOS
SMALLEST_BPE = 256 + 2  # every byte, one merge, BOS
GPT2_VOCAB_SIZE = 50257


def _is_tokenizer(value: Any) -> bool:
    if not isinstance(value, dict):
        return value in ("bytes", "gpt2")
    size, file = value.get("bpe"), value.get("file")
    return len(value) == 1 and (isinstance(file, str) or (type(size) is int and size >= SMALLEST_BPE))


Paths = Annotated[list[str], Must("a non-empty list of paths", len)]
Tokenizer = Annotated[
    str | dict[str, Any],
    Must(f"bytes, gpt2, {{bpe: {SMALLEST_BPE} or more}} or {{file: PATH}}", _is_tokenizer),
]


@dataclass(frozen=True)
class CorpusConfig:
    """The choice of a corpus, shared by the data settings of all papers; each adds a mapping ``options``.

    Attributes:
        corpus: the name of a corpus, a function of ``corpora.py``.
        path: the path of the corpus: a file, a folder or a data set.
    """

    # Fields of subclasses that are options of some corpora.
    NAMED: ClassVar[tuple[str, ...]] = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    corpus: str
    path: str | Paths | None = None

    @property
    def function(self) -> CorpusFunction:
        """The function that reads the texts."""
        return find_corpus(self.corpus)

    def __post_init__(self) -> None:
        if isinstance(self.path, list):
            object.__setattr__(self, "path", tuple(self.path))
        if isinstance(self.path, tuple) and self.corpus != "text":
            raise DataError(f"path: `corpus: {self.corpus}` accepts one path")
        self.function.check(self.path, self.arguments())
        for of in fields(self):
            is_taken = of.name not in self.NAMED or of.name in self.function.options
            if not is_taken and getattr(self, of.name) != of.default:
                takers = [name for name, other in CORPORA.items() if of.name in other.options]
                raise DataError(f"{of.name}: only `corpus: {' or '.join(takers)}` accepts it; remove it")

    def arguments(self) -> dict[str, Any]:
        """The options of the function, from the settings."""
        given = {name: getattr(self, name) for name in self.NAMED if name in self.function.options}
        return {name: value for name, value in given.items() if value is not None} | self.options

    @contextlib.contextmanager
    def errors_at(self, place: str) -> Iterator[None]:
        """A context in which errors of the corpus begin with ``place``, the file and key of a suite."""
        try:
            yield
        except DataError as error:
            key = str(error).partition(": ")[0]
            is_key = key in {of.name for of in fields(self)} or key.startswith("options.")
            raise DataError(f"{place}{'.' if is_key else ': '}{error}") from error

    def source(self) -> Source:
        """The source of the corpus, not read yet; see `CorpusFunction.open`."""
        return self.function.open(self.path, self.arguments())


@dataclass(frozen=True)
class DataConfig(CorpusConfig):
    """A corpus, its held-out split and its tokeniser.

    Attributes:
        corpus, path: see `CorpusConfig`. For ``text``, ``path`` may be a list of paths (stored as a tuple),
            which are read in order.
        text_field: the field of ``.jsonl`` files, or of the data set, that contains the text.
        heldout: the held-out fraction of documents (null: 0.05), or for ``text`` the held-out paths. Of a
            single document the last part is held out, from the end of a paragraph. With 0 nothing is held
            out, and nothing can be measured on this text. Paths (a list is stored as a tuple) may be under
            ``path``: exactly their documents are held out. Null for ``longcrawl64``, which is already split.
        tokenizer: the tokenizer (null: ``bytes``). ``{"bpe": V}`` is a byte-pair encoding with V ids,
            including BOS, trained on the training documents; ``"gpt2"`` is GPT-2's; ``{"file": PATH}`` is an
            existing ``tokenizer.json``. ``longcrawl64`` consists of GPT-2 ids, so it accepts ``"gpt2"`` or a
            file with GPT-2's tokeniser, which decodes ids.
        config: for ``hf``: the data set's configuration, if it has several.
        split: for ``hf``: the split of the data set (null: ``train``). ``heldout`` divides this split.
        max_documents: for ``hf``: the number of documents that are downloaded, from the first one on.
        options: other options of the corpus's function.
    """

    NAMED = ("text_field", "config", "split", "max_documents")

    corpus: str = "stdlib"
    text_field: str = "text"
    heldout: Annotated[float, within("[0, 1)")] | str | Paths | None = None
    tokenizer: Tokenizer | None = None
    config: str | None = None
    split: str | None = None
    max_documents: Count | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_split = self.corpus == "longcrawl64"
        self._set("tokenizer", "gpt2" if is_split else "bytes")
        if isinstance(self.heldout, list):
            object.__setattr__(self, "heldout", tuple(self.heldout))
        super().__post_init__()
        if is_split and self.heldout is not None:
            raise DataError("heldout: `corpus: longcrawl64` holds out heldout.zarr; remove the key")
        if is_split and (self.bpe_size or self.tokenizer == "bytes"):
            raise DataError("tokenizer: `corpus: longcrawl64` consists of GPT-2 ids; remove the key")
        if self.heldout_paths and self.corpus != "text":
            raise DataError(f"heldout: `corpus: {self.corpus}` accepts a fraction such as 0.05, not paths")
        if not is_split:
            self._set("heldout", DEFAULT_HELDOUT)
        if self.corpus == "hf":
            self._set("split", "train")
            if self.max_documents is None:
                raise DataError("max_documents: missing; `corpus: hf` requires a number such as 10_000")

    def _set(self, name: str, default: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, default)

    def arguments(self) -> dict[str, Any]:
        is_left_out = self.corpus == "text" and self.heldout_paths
        return super().arguments() | ({"exclude": self.heldout_paths} if is_left_out else {})

    @property
    def bpe_size(self) -> int | None:
        """The vocabulary size of a BPE that is trained on the corpus, or None."""
        return self.tokenizer.get("bpe") if isinstance(self.tokenizer, Mapping) else None

    @property
    def tokenizer_file(self) -> str | None:
        """The path of the given ``tokenizer.json``, or None."""
        return self.tokenizer.get("file") if isinstance(self.tokenizer, Mapping) else None

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size if the settings determine it; None for ``{file: PATH}``."""
        if self.corpus == "longcrawl64" or self.tokenizer == "gpt2":
            return GPT2_VOCAB_SIZE
        return self.bpe_size or (BYTES_VOCAB_SIZE if self.tokenizer == "bytes" else None)

    @property
    def heldout_paths(self) -> tuple[str, ...]:
        """The held-out paths; empty if ``heldout`` is a fraction."""
        if isinstance(self.heldout, str):
            return (self.heldout,)
        return self.heldout if isinstance(self.heldout, tuple) else ()
