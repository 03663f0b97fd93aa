"""One registry of corpora, for every paper: a corpus is a function that gives its texts.

    @corpus(path="the path of the reviews", labels="sentiments")
    def reviews(path: str, least_stars: int = 0) -> Iterator[Row]:
        "Reviews of restaurants: JSON lines with `text` and `stars`."
        for where, record in read_records(path):
            ...
            yield Row(text, label=sentiment)

The corpus has the function's name: ``corpus: reviews``. Its parameters, except ``path``, are the names that
``options`` may have. Ours are in `corpora`. Another package adds one with an entry point: the module that
registers it is imported when settings name the corpus::

    [project.entry-points."acp_repro.corpora"]
    reviews = "their_package.corpora"
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acp_repro.common.errors import did_you_mean
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Row, RowSource, Source

ENTRY_POINTS = "acp_repro.corpora"


@dataclass(frozen=True)
class CorpusFunction:
    """A function that gives a corpus, with facts about it.

    Attributes:
        path: what its ``path`` must be, in words; empty if it takes none. One with a default may be left out.
        several: whether ``path`` may be a list.
        labels: what labels are names of; ``{option}`` is replaced. Empty if its texts have none.
        sides: for labels that are 1 or 0, the question that they answer, beginning with "whether".
        called: what captions call its texts; ``{path}`` is replaced. Default: "texts of PATH".
    """

    name: str
    read: Callable[..., Iterable[Row] | Source]
    path: str = ""
    several: bool = False
    labels: str = ""
    sides: str = ""
    called: str = ""

    @property
    def what(self) -> str:
        """What it is, in a line."""
        return (inspect.getdoc(self.read) or "").partition("\n")[0].removesuffix(".")

    @functools.cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.read).parameters

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The parameters besides ``path``, with their defaults."""
        return {n: p.default for n, p in self._parameters.items() if n not in ("path", "cache")}

    def in_words(self, path: str | None) -> str:
        """A name of its texts, for a caption."""
        return self.called.format(path=path) or (f"texts of {path}" if path else f"texts of {self.name}")

    def place(self, path: str | Sequence[str] | None) -> str:
        """``path: PATH``, or ``corpus: NAME`` if it has none: how an error about its texts begins."""
        paths = [path] if isinstance(path, str) else path
        return f"path: {', '.join(paths)}" if paths else f"corpus: {self.name}"

    def check(self, path: Any, options: Mapping[str, Any]) -> None:
        """Checks a path and options.

        Raises:
            DataError: it does not take them, or needs another; the message begins with the key.
        """
        if not self.path:
            if path is not None:
                raise DataError(f"path: `corpus: {self.name}` takes none; remove it, or set corpus: text")
        elif self.several and isinstance(path, list | tuple):
            if not path or not all(isinstance(one, str) and one for one in path):
                raise DataError(f"path: {list(path)} is not a list of paths; name at least one")
        elif not ((isinstance(path, str) and path) or path is self._parameters["path"].default):
            raise DataError(f"path: {path!r}, but `corpus: {self.name}` needs {self.path}")
        for name in options:
            if name not in self.options:
                takes = ", ".join(self.options) or "none"
                raise DataError(f"options.{name}: unknown; the options of `corpus: {self.name}` are {takes}")
            value, default = options[name], self.options[name]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if isinstance(default, int | float) and not isinstance(default, bool) and not number:
                raise DataError(f"options.{name}: {value!r} is no number; the default is {default}")
        for name, default in self.options.items():
            if default is inspect.Parameter.empty and name not in options:
                raise DataError(f"options.{name}: missing, and `corpus: {self.name}` needs it")

    def open(
        self, path: Any = None, options: Mapping[str, Any] | None = None, cache: Path | None = None
    ) -> Source:
        """The corpus, not read yet.

        Args:
            cache: the folder for fetched text, if not the usual one.

        Raises:
            DataError: see `check`; or the function itself finds an error.
        """
        self.check(path, options or {})
        given = dict(options or {})
        given |= {"path": path} if path is not None else {}
        given |= {"cache": cache} if "cache" in self._parameters else {}
        found = self.read(**given)
        return found if isinstance(found, Source) else RowSource(self.name, lambda: self.read(**given))


CORPORA: dict[str, CorpusFunction] = {}


def corpus(path: str = "", **said: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the corpus of its name; ``said`` are attributes of `CorpusFunction`.

    The first line of the function's docstring is shown in help.
    """

    def register(read: Callable[..., Any]) -> Callable[..., Any]:
        CORPORA[read.__name__] = CorpusFunction(read.__name__, read, path, **said)
        return read

    return register


def find_corpus(name: Any) -> CorpusFunction:
    """The corpus of that name.

    Raises:
        DataError: there is none; the message lists the names.
    """
    others = importlib.metadata.entry_points(group=ENTRY_POINTS) if name not in CORPORA else ()
    for point in others:
        if point.name == name:
            try:
                point.load()
            except (ImportError, AttributeError) as error:
                raise DataError(f"corpus: {name}: {point.value} cannot be imported ({error})") from error
    if name not in CORPORA:
        *first, last = known = dict.fromkeys([*CORPORA, *(point.name for point in others)])
        advice = did_you_mean(name, known) or f"; use {', '.join(first)} or {last}"
        raise DataError(f"corpus: {name!r} is not known{advice}")
    return CORPORA[name]
