"""One registry of corpora, for every paper: a corpus is a function that gives its texts.

    @corpus(path="the path of the reviews", labels="sentiments")
    def reviews(path: str, least_stars: int = 0) -> Iterator[Row]:
        "Reviews of restaurants: JSON lines with `text` and `stars`."
        for where, record in read_records(path):
            ...
            yield Row(text, label=sentiment)

The corpus has the function's name: ``corpus: reviews``. Its parameters, except ``path``, are the names that
``options`` may have. Ours are in `corpora`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acp_repro.common.errors import did_you_mean
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Row, RowSource, Source


@dataclass(frozen=True)
class CorpusFunction:
    """A function that gives a corpus, with facts about it.

    Attributes:
        path: what its ``path`` must be, in words; empty if it takes none. One with a default may be left out.
        labels: what labels are names of; ``{option}`` is replaced. Empty if its texts have none.
        sides: for labels that are 1 or 0, the question that they answer, beginning with "whether".
        called: what captions call its texts; ``{path}`` is replaced. Default: "texts of PATH".
    """

    name: str
    read: Callable[..., Iterable[Row] | Source]
    path: str = ""
    labels: str = ""
    sides: str = ""
    called: str = ""

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.read) or "").partition("\n")[0].removesuffix(".")

    @property
    def options(self) -> dict[str, Any]:
        """The parameters besides ``path``, with their defaults."""
        parameters = inspect.signature(self.read).parameters
        return {name: one.default for name, one in parameters.items() if name != "path"}

    def in_words(self, path: str | None) -> str:
        """A name of its texts, for a caption."""
        return self.called.format(path=path) or (f"texts of {path}" if path else f"texts of {self.name}")

    def place(self, path: str | Sequence[str] | None) -> str:
        """``path: PATH``, or ``corpus: NAME`` if it has none: how an error about its texts begins."""
        paths = [path] if isinstance(path, str) else path
        return f"path: {', '.join(paths)}" if paths else f"corpus: {self.name}"

    def check(self, path: Any, options: Mapping[str, Any]) -> None:
        """Checks a path and options of a suite's file."""
        if (path is not None) > bool(self.path):
            raise DataError(f"path: `corpus: {self.name}` takes none; remove it")
        if not path and self.path and inspect.signature(self.read).parameters["path"].default is not None:
            raise DataError(f"path: {path!r}, but `corpus: {self.name}` needs {self.path}")
        for name in options:
            if name not in self.options:
                takes = ", ".join(self.options) or "none"
                raise DataError(f"options.{name}: unknown; the options of `corpus: {self.name}` are {takes}")
            value, default = options[name], self.options[name]
            if isinstance(default, int) and not isinstance(value, int):
                raise DataError(f"options.{name}: {value!r} is no number; the default is {default}")

    def open(self, path: Any = None, options: Mapping[str, Any] | None = None) -> Source:
        """The corpus, not read yet."""
        given = dict(options or {})
        self.check(path, given)
        if path is not None:
            given["path"] = path
        source = self.read(**given)
        return source if isinstance(source, Source) else RowSource(self.name, lambda: self.read(**given))


CORPORA: dict[str, CorpusFunction] = {}


def corpus(path: str = "", **facts: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the corpus of its name; ``facts`` are attributes of `CorpusFunction`."""

    def register(read: Callable[..., Any]) -> Callable[..., Any]:
        CORPORA[read.__name__] = CorpusFunction(read.__name__, read, path, **facts)
        return read

    return register


def find_corpus(name: str) -> CorpusFunction:
    """The corpus of that name."""
    if name not in CORPORA:
        advice = did_you_mean(name, CORPORA) or f"; use {', '.join(CORPORA)}"
        raise DataError(f"corpus: {name!r} is not known{advice}")
    return CORPORA[name]
