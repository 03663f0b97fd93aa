"""The corpora of all papers: a corpus is a function that yields texts, registered by its name.

    @corpus(path="the path of the reviews", labels="sentiments")
    def reviews(path: str, least_stars: int = 0) -> Iterator[Row]:
        "Reviews of restaurants: JSON lines with `text` and `stars`."
        for where, record in read_records(path):
            ...
            yield Row(text, label=sentiment)

A suite selects this corpus by ``corpus: reviews``; the function's parameters, except ``path``, are the keys
of ``options``. A labelled set is a corpus whose texts have labels. To add a corpus, write a function in this
module; see CONTRIBUTING.md. ``python -m acp_repro.data --help`` shows the first line of its docstring. Errors
name the file and the line.
"""

import ast
import csv
import hashlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acp_repro.common.digests import hash_number
from acp_repro.common.errors import did_you_mean
from acp_repro.pipeline.data.files import (
    DataError,
    field_of,
    is_json,
    json_records,
    read_members,
    read_records,
    text_of,
)
from acp_repro.pipeline.data.hf import HubSource
from acp_repro.pipeline.data.sources import (
    SPLITS,
    Row,
    RowSource,
    Source,
    StdlibSource,
    TextSource,
    sample_text,
)


@dataclass(frozen=True)
class CorpusFunction:
    """A function that reads a corpus, with a description.

    Attributes:
        path: a description of the ``path`` argument, which is optional if it has a default; empty if the
            function has no ``path``.
        labels: what the labels name; ``{option}`` is replaced. Empty if the texts have no labels.
        sides: for labels 1 and 0, the question that they answer, beginning with "whether".
        called: the name of the texts in captions; ``{path}`` is replaced. Default: "texts of PATH".
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
        """Maps the parameters except ``path`` to their defaults."""
        parameters = inspect.signature(self.read).parameters
        return {name: one.default for name, one in parameters.items() if name != "path"}

    def in_words(self, path: str | None) -> str:
        """The name of the texts for a caption."""
        return self.called.format(path=path) or (f"texts of {path}" if path else f"texts of {self.name}")

    def place(self, path: str | Sequence[str] | None) -> str:
        """The beginning of an error about the texts: ``path: PATH``, or ``corpus: NAME`` without a path."""
        paths = [path] if isinstance(path, str) else path
        return f"path: {', '.join(paths)}" if paths else f"corpus: {self.name}"

    def check(self, path: Any, options: Mapping[str, Any]) -> None:
        """Checks the path and options of a suite file."""
        if (path is not None) > bool(self.path):
            raise DataError(f"path: `corpus: {self.name}` accepts no path; remove the key")
        if not path and self.path and inspect.signature(self.read).parameters["path"].default is not None:
            raise DataError(f"path: {path!r}, but `corpus: {self.name}` needs {self.path}")
        for name in options:
            if name not in self.options:
                takes = ", ".join(self.options) or "none"
                raise DataError(f"options.{name}: unknown; the options of `corpus: {self.name}` are {takes}")
            value, default = options[name], self.options[name]
            if isinstance(default, int) and not isinstance(value, int):
                raise DataError(f"options.{name}: {value!r} is not a number; the default is {default}")

    def open(self, path: Any = None, options: Mapping[str, Any] | None = None) -> Source:
        """The source of the corpus, not read yet."""
        given = dict(options or {})
        self.check(path, given)
        if path is not None:
            given["path"] = path
        source = self.read(**given)
        return source if isinstance(source, Source) else RowSource(self.name, lambda: self.read(**given))


CORPORA: dict[str, CorpusFunction] = {}


def corpus(path: str = "", **facts: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that registers a function as a corpus; ``facts`` are attributes of `CorpusFunction`."""

    def register(read: Callable[..., Any]) -> Callable[..., Any]:
        CORPORA[read.__name__] = CorpusFunction(read.__name__, read, path, **facts)
        return read

    return register


def find_corpus(name: str) -> CorpusFunction:
    """The corpus called ``name``."""
    if name not in CORPORA:
        advice = did_you_mean(name, CORPORA) or f"; use {', '.join(CORPORA)}"
        raise DataError(f"corpus: {name!r} is not known{advice}")
    return CORPORA[name]


# --- the corpora -------------------------------------------------------------------------------------------

_SET = "the path of its file"
_SENTIMENTS = {"labels": "sentiments", "sides": "whether a review is positive or negative"}


@corpus()
def stdlib() -> Source:
    """The standard library of the running Python; needs no download."""
    return StdlibSource()


@corpus(path="the path of a file or a folder")
def text(path: str | Sequence[str], text_field: str = "text", exclude: Sequence[str] = ()) -> Source:
    """Files at `path`: plain text or .json, .jsonl, .ndjson, each also .xz, .zst, .gz, .bz2."""
    return TextSource([path] if isinstance(path, str) else path, text_field, exclude)


@corpus(path="the path of a file", labels="values of {label_field}")
def file(path: str, text_field: str = "text", label_field: str | None = None) -> Iterator[Row]:
    """Records of the file `path`: .csv or JSON, each also .xz, .zst, .gz, .bz2."""
    for where, record in read_records(path, text_field):
        label = None if label_field is None else str(field_of(record, label_field, where))
        yield Row(text_of(record, text_field, where), label)


@corpus(
    path="the name of a dataset, such as owner/name",
    labels="values of {label_field}",
    called="texts of the data set {path}",
)
def hf(
    path: str,
    config: str | None = None,
    split: str = "train",
    dev: str | None = None,
    test: str | None = None,
    text_field: str = "text",
    label_field: str | None = None,
    max_documents: int | None = None,
) -> Source:
    """A Hugging Face dataset, `path: owner/name`, its first `max_documents` documents."""
    others = {"dev": dev, "test": test} if dev or test else {}
    splits = {"train" if others else None: split} | {here: name for here, name in others.items() if name}
    fields = {"text": text_field} | ({"label": label_field} if label_field else {})
    return HubSource(path, config, splits, fields, max_documents)


@corpus(path="the path of the folder with train.zarr and heldout.zarr")
def longcrawl64(path: str) -> Source:
    """The ACP paper's corpus: a folder `path` with train.zarr and heldout.zarr."""
    raise DataError("corpus: longcrawl64 consists of GPT-2 ids, not text; use another corpus")


@corpus(
    labels="what sentences document",
    sides="whether a sentence documents a function or method, or else a class or module",
    called="sentences of the standard library's documentation",
)
def stdlib_sentences(min_chars: int = 20, max_chars: int = 160) -> Iterator[Row]:
    """Unique sentences of the standard library's documentation, labelled by the kind of object they document.

    Args:
        min_chars, max_chars: bounds of the length of a sentence, in characters.
    """
    for sentence, of_function in docstring_sentences(min_chars, max_chars).items():
        label = "function or method" if of_function else "class or module"
        yield Row(sentence, label, number=int(of_function))


@corpus(called="short sentences of the standard library's documentation and of a novel")
def short_sentences(min_chars: int = 20, max_chars: int = 160) -> Iterator[Row]:
    """Sentences of the standard library's documentation and of the sample novel, without labels.

    Args:
        min_chars, max_chars: bounds of the length of a sentence, in characters. Longer sentences of the novel
            are split into clauses.
    """
    for sentence in docstring_sentences(min_chars, max_chars) | novel_clauses(min_chars, max_chars):
        yield Row(sentence)


_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_CLAUSE_END = re.compile(r"(?<=[,;:])\s+")
_PROSE = re.compile(r"[A-Za-z][\w'\-]*")


def docstring_sentences(min_chars: int, max_chars: int) -> dict[str, bool]:
    """Maps each sentence of docstrings to whether it documents a function or method; else a class or module.

    If a sentence occurs several times, the first occurrence counts.
    """
    found: dict[str, bool] = {}
    for document in StdlibSource().documents():
        if not document.name.endswith(".py"):
            continue
        for docstring, of_function in _docstrings(document.data.decode()):
            for sentence in _sentences(docstring):
                if min_chars <= len(sentence) <= max_chars:
                    found.setdefault(sentence, of_function)
    return found


def novel_clauses(min_chars: int, max_chars: int) -> dict[str, None]:
    """Sentences of the sample novel in their order. Sentences that are too long are split into clauses."""
    found: dict[str, None] = {}
    for sentence in _sentences(sample_text()):
        pieces = [sentence] if len(sentence) <= max_chars else _CLAUSE_END.split(sentence)
        found |= dict.fromkeys(piece for piece in pieces if min_chars <= len(piece) <= max_chars)
    return found


def _docstrings(source: str) -> Iterator[tuple[str, bool]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template, for example in lib2to3
        return
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *functions)) and (text := ast.get_docstring(node)):
            yield text, isinstance(node, functions)


def _sentences(prose: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", prose):
        lines = paragraph.splitlines()
        # Indented lines and prompts are examples, not prose.
        if any(line.startswith((" ", ">>>", "-", "*", "+", ".")) for line in lines):
            continue
        for sentence in _SENTENCE_END.split(" ".join(" ".join(lines).split())):
            if len(_PROSE.findall(sentence)) >= 3:
                yield sentence


@corpus(labels="packages of the Python standard library")
def stdlib_packages(
    classes: int = 8, characters: int = 600, most_each: int = 400, whole_modules: bool = True
) -> Iterator[Row]:
    """Parts of the standard library, labelled by package.

    The name of the package is masked in the text, so that a model cannot simply read the label.

    Args:
        classes: the number of packages; the packages with the most text are used.
        characters: the length of a part.
        most_each: the largest number of parts per package, spread over its modules.
        whole_modules: assign all parts of a module to one split, which tests generalisation to other modules
            of a package. False assigns each part separately, which tests the vocabulary of known modules.
    """
    parts: dict[str, list[tuple[str, str]]] = {}
    for document in StdlibSource().documents():
        package, _, module = document.name.partition("/")
        if not module or package == "help":
            continue
        # This also matches within names such as xml_reader, where \b is no word boundary.
        alone = rf"(?<![^\W_]){re.escape(package)}(?![^\W_])"
        words = re.sub(alone, "_", document.data.decode())
        for start in range(0, len(words) - characters // 2, characters):
            parts.setdefault(package, []).append((document.name, words[start : start + characters]))
    for package in sorted(parts, key=lambda name: (-len(parts[name]), name))[:classes]:
        by_hash = sorted(parts[package], key=lambda part: hashlib.sha256(part[1].encode()).digest())
        for module, part in by_hash[:most_each]:
            yield Row(part, package, group=module if whole_modules else f"{module} {part}")


@corpus(path="the path of its folder or .tar", **_SENTIMENTS)
def sst2(path: str) -> Iterator[Row]:
    """SST-2: train.tsv, dev.tsv and test.tsv with the columns `sentence` and `label`."""
    for split, data in zip(SPLITS, read_members(path, *(f"/{split}.tsv" for split in SPLITS)), strict=True):
        where = f"path: {path}, {split}.tsv"
        for record in csv.DictReader(data.decode().split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE):
            review, label = (field_of(record, name, where) for name in ("sentence", "label"))
            yield Row(review.strip(), label, split=split)


@corpus(path=_SET, **_SENTIMENTS)
def imdb(path: str) -> Iterator[Row]:
    """IMDb reviews: JSON lines with `split` (train or test; others have no label), `label` and `text`."""
    for where, record in read_records(path):
        review = text_of(record, "text", where).replace("<br />", " ")
        if (split := field_of(record, "split", where)) in ("train", "test"):
            yield Row(review, str(field_of(record, "label", where)), split=split)
        else:
            yield Row(review)


@corpus(path=_SET, labels="types of contract")
def cuad(path: str, least: int = 10) -> Iterator[Row]:
    """CUAD contracts, labelled by type: JSON lines with `file`, `type` and `text`.

    Args:
        least: types with fewer contracts are excluded.
    """
    rows = []
    for where, record in read_records(path):
        group, label = (field_of(record, name, where) for name in ("file", "type"))
        rows.append(Row(text_of(record, "text", where), label, group=group))
    counts = Counter(row.label for row in rows if row.text.strip())
    yield from (row for row in rows if counts[row.label] >= least)


@corpus(path="the path of its folder or .tar", labels="roles of a sentence")
def csabstruct(path: str) -> Iterator[Row]:
    """CSAbstruct: abstracts with a question about each sentence; the label is the sentence's role."""
    for split, data in zip(SPLITS, read_members(path, *(f"/{split}.jsonl" for split in SPLITS)), strict=True):
        for where, record in json_records(data.split(b"\n"), f"{path}, {split}.jsonl"):
            asked, labels = (field_of(record, name, where) for name in ("sentences", "labels"))
            for sentence, label in zip(asked, labels, strict=True):
                yield Row(" ".join(asked), label, sentence, split=split)


@corpus(path="the path of its JSON lines, a file or a folder of them", labels="authors")
def books(
    path: str,
    characters: int = 16_000,
    most_each: int = 8,
    least: int = 3,
    files: Sequence[str] | None = None,
) -> Iterator[Row]:
    """Excerpts of books, labelled by author: JSON lines with `id`, `text` and `author`.

    All excerpts of a book belong to one split.

    Args:
        characters: the length of an excerpt.
        most_each: the largest number of excerpts per book, evenly spaced.
        least: the smallest number of books per author.
        files: file names in the folder; None reads all files.
    """
    place = Path(path).expanduser()
    shards = sorted(filter(is_json, place.iterdir())) if place.is_dir() else [place]
    if files is not None:
        shards = [place / name for name in files]
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for where, record in (one for shard in shards for one in read_records(shard)):
        book, author = (str(field_of(record, name, where)) for name in ("id", "author"))
        words = text_of(record, "text", where)
        step = max(characters, len(words) // most_each)
        pieces = [words[at : at + characters] for at in range(0, len(words) - characters + 1, step)]
        found.setdefault(author, []).append((book, pieces[:most_each]))
    for author, of_author in sorted(found.items()):
        # The rank among the author's books determines the split, so that every split contains every class.
        ranked = sorted(of_author, key=lambda book: hashlib.sha256(book[0].encode()).digest())
        for rank, (book, pieces) in enumerate(ranked if len(ranked) >= least else ()):
            split = "test" if rank == 0 else "dev" if rank == 1 and len(ranked) > 3 else "train"
            yield from (Row(piece, author, split=split, group=book) for piece in pieces)


_NAMES = "Nora Otto Petra Quinn Rosa Silas Tilda Urban Vera Wanda Xaver Yara Anton Berta Clara David"
_CODES = "amber birch coral delta ember frost grove hazel ivory jade karma lemon"


@corpus(path="the path of text to plant facts in", labels="codes that a text tells")
def facts(
    path: str | None = None,
    examples: int = 20_000,
    characters: int = 2000,
    facts: int = 6,
    classes: int = 8,
    short: int = 0,
    short_characters: int = 700,
) -> Iterator[Row]:
    """Short facts in long text, with a question about one of them; `path`, else the standard library.

    For example, "The code of Nora is amber." is inserted together with other such facts. The question is
    about Nora, and the class is amber.

    Args:
        examples: the number of examples in all splits together.
        facts: the number of facts in each example, with distinct names and random codes.
        classes: the number of codes.
        short: the number of additional training examples of length `short_characters`, from which an encoder
            learns what the question means if other texts are long. Dev and test have only long texts.
    """
    names, codes = _NAMES.split(), _CODES.split()[:classes]
    if not 1 <= facts <= len(names) or not 2 <= classes <= len(codes):
        raise DataError(f"options: use facts from 1 to {len(names)}, and classes from 2 to 12")
    source = StdlibSource() if path is None else TextSource([path])
    pool = "\n".join(document.data.decode() for document in source.documents())
    if len(pool) < 10 * characters:
        raise DataError(f"path: {path} has {len(pool):,} characters; facts need at least {10 * characters:,}")
    for number in range(examples + short):
        draw = _Draw(f"facts {number}")
        length = characters if number < examples else short_characters
        start = draw.below(len(pool) - length)
        words = pool[start : start + length]
        chosen = draw.sample(names, facts)
        told = [codes[draw.below(classes)] for _ in chosen]
        for at, name, code in sorted(
            ((draw.below(len(words)), n, c) for n, c in zip(chosen, told, strict=True)), reverse=True
        ):
            words = f"{words[:at]} The code of {name} is {code}. {words[at:]}"
        split = None
        if short:
            part = draw.below(10) if number < examples else 9
            split = "test" if part < 2 else "dev" if part < 3 else "train"
        asked = f"What is the code of {chosen[0]}?"
        yield Row(words, told[0], asked, split=split, group=f"facts {number}")


class _Draw:
    """Random numbers seeded by a name, identical in every version of Python."""

    def __init__(self, name: str):
        self._name, self._count = name, 0

    def below(self, limit: int) -> int:
        self._count += 1
        return hash_number(f"{self._name} {self._count}".encode()) % limit

    def sample(self, values: list[str], count: int) -> list[str]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(count)]


@corpus(path="the path of its JSON lines or of a .tar with them")
def qasper(path: str) -> Iterator[Row]:
    """Questions about papers with answers that are verbatim in the text (LEval's sample of QASPER).

    The files are JSON lines with ``input``, ``instructions`` and ``outputs``. The sample is too small for
    measurements; it only tests that questions work.
    """
    lines = (
        read_records(path)
        if is_json(Path(path))
        else json_records(read_members(path, ".jsonl")[0].split(b"\n"), path)
    )
    for where, record in lines:
        paper = text_of(record, "input", where)
        asked, answers = (field_of(record, name, where) for name in ("instructions", "outputs"))
        for question, answer in zip(asked, answers, strict=True):
            at = paper.find(answer)
            if at >= 0 and answer:
                yield Row(paper, None, question, (at, at + len(answer)), (answer,), group=paper)
