"""Labelled sets for encoders: text, or a question and a text, with a class or an answer in the text.

Every reader gives the same three splits, the same ones each time: ``train`` to learn from, ``dev`` to choose
by, ``test`` to report. Where a set has no such split, an example goes to one by a hash of what it belongs to
(its document, its book), so adding examples moves no other one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acp_repro.data.files import DataError, open_plain
from acp_repro.data.sources import StdlibSource

SPLITS = ("train", "dev", "test")
_DEV, _TEST = 0.1, 0.2  # shares of what comes without a split


@dataclass(frozen=True)
class Example:
    """One example.

    Attributes:
        text: what may be pruned.
        question: what stands before it and is asked of it; empty for none.
        label: the number of its class; -1 for a question with an answer.
        answer: (start, end) of the answer's characters in ``text``, for extractive questions.
        answers: all answers in words, for their scores.
    """

    text: str
    question: str = ""
    label: int = -1
    answer: tuple[int, int] | None = None
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelledSet:
    """A set in memory.

    Attributes:
        splits: examples by ``train``, ``dev``, ``test``.
        classes: names of the classes in the order of their numbers; empty for extractive questions.
        classes_are: what they are names of, in words.
    """

    splits: dict[str, list[Example]]
    classes: tuple[str, ...] = ()
    classes_are: str = "classes"
    _hash: list[str] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_extractive(self) -> bool:
        return not self.classes

    @property
    def identity(self) -> str:
        """A SHA-256 that changes when any example does."""
        if not self._hash:
            digest = hashlib.sha256()
            for split in SPLITS:
                for e in self.splits[split]:
                    digest.update(json.dumps([split, e.text, e.question, e.label, e.answer]).encode())
            self._hash.append(digest.hexdigest())
        return self._hash[0]


# (split or None, what it belongs to, text, question, name of the class)
Row = tuple[str | None, str, str, str, str]


def read_labelled(reader: str, path: str | None = None, **options: Any) -> LabelledSet:
    """A labelled set.

    Args:
        reader: a name in :data:`READERS`.
        path: the file or folder (tar, xz, plain) of the set, or the name of a set of Hugging Face's.
        options: of the reader.

    Raises:
        DataError: no such reader or file, or not of its layout.
    """
    if reader not in READERS:
        raise DataError(f"reader: must be one of {', '.join(READERS)}, got {reader!r}")
    try:
        return READERS[reader](path, **options)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise DataError(f"reader {reader}: {error}") from None
        raise


def _classes(rows: Iterator[Row], classes_are: str, least: int = 1) -> LabelledSet:
    """Rows as a set of classes in alphabetical order; those with fewer than ``least`` examples left out.

    What has no text or no class is no example."""
    rows = [row for row in rows if row[4].strip() and row[2].strip()]
    counts = Counter(row[4] for row in rows)
    names = tuple(sorted(name for name, count in counts.items() if count >= least))
    if len(names) < 2:
        raise DataError(f"a labelled set needs two classes, this one has {len(names)}")
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    for split, belongs_to, text, question, name in rows:
        if name in names:
            label = names.index(name)
            splits[split or _split_of(belongs_to)].append(Example(text, question, label))
    return LabelledSet(splits, names, classes_are)


def _split_of(belongs_to: str) -> str:
    share = int.from_bytes(hashlib.sha256(belongs_to.encode()).digest()[:8], "big") / 2**64
    return "test" if share < _TEST else "dev" if share < _TEST + _DEV else "train"


def _files(path: str | None, *names: str) -> dict[str, str]:
    """The text of files by their names' ends, from a folder, a tar, or one file alone.

    Raises:
        DataError: there is no such thing, or it is not text.
    """
    if path is None:
        raise DataError("path: this reader needs the file or folder of its set")
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(f"path: {path} is not there; relative paths start at {Path.cwd()}")
    try:
        if place.is_dir():
            content = {p.as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}
        elif ".tar" in place.suffixes:
            with tarfile.open(place) as archive:
                content = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
        else:
            with open_plain(place) as (stream, _):
                content = {place.name: stream.read()}
        found = {}
        for name in names:
            fits = [n for n in content if n.endswith(name) and "/._" not in n]
            if len(fits) != 1:
                raise DataError(f"{path}: has {len(fits)} files called *{name}; one is needed")
            found[name] = content[fits[0]].decode()
        return found
    except (OSError, tarfile.TarError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); copy it again") from error


def _json_lines(text: str, where: str, *fields: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            missing = [name for name in fields if name not in record]
        except (ValueError, TypeError) as error:
            raise DataError(f"{where}, line {number}: not a JSON object ({error})") from None
        if missing:
            raise DataError(f"{where}, line {number}: has no field {missing[0]!r}, but {', '.join(record)}")
        yield record


# ---- the sets ---------------------------------------------------------------------------------


def stdlib(
    path: str | None = None,
    classes: int = 8,
    characters: int = 600,
    most_each: int = 400,
    whole_modules: bool = True,
) -> LabelledSet:
    """Parts of the Python standard library; the class is the package that a part comes from.

    Line by line the package's own name is left out, so that it is
    not simply read.

    Args:
        classes: how many packages, those with the most text.
        characters: of a part.
        most_each: parts of one package, spread over its modules.
        whole_modules: a module's parts are all in one split, which asks for what modules of a package share;
            else each part is in a split of its own, which asks for the words of known modules.
    """
    parts: dict[str, list[tuple[str, str]]] = {}
    for document in StdlibSource(Path(path) if path else None).documents():
        package, _, module = document.name.partition("/")
        if not module or package == "help":
            continue
        # Also within names such as xml_reader: an underscore is no end of a word to \b.
        alone = rf"(?<![^\W_]){re.escape(package)}(?![^\W_])"
        text = re.sub(alone, "_", document.data.decode())
        for start in range(0, len(text) - characters // 2, characters):
            parts.setdefault(package, []).append((document.name, text[start : start + characters]))
    largest = sorted(parts, key=lambda name: (-len(parts[name]), name))[:classes]

    def rows() -> Iterator[Row]:
        for package in largest:
            by_hash = sorted(parts[package], key=lambda part: hashlib.sha256(part[1].encode()).digest())
            for module, text in by_hash[:most_each]:
                yield None, module if whole_modules else f"{module} {text}", text, "", package

    return _classes(rows(), "packages of the Python standard library")


def sst2(path: str | None = None) -> LabelledSet:
    """SST-2: ``train.tsv``, ``dev.tsv`` and ``test.tsv`` with the columns ``sentence`` and ``label``."""
    found = _files(path, "/train.tsv", "/dev.tsv", "/test.tsv")

    def rows() -> Iterator[Row]:
        for name, text in found.items():
            lines = csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
            if not {"sentence", "label"} <= set(lines.fieldnames or ()):
                raise DataError(f"{path}, {name}: needs the columns sentence and label")
            for row in lines:
                yield name.strip("/").removesuffix(".tsv"), "", row["sentence"].strip(), "", row["label"]

    return _classes(rows(), "sentiments")


def imdb(path: str | None = None) -> LabelledSet:
    """IMDb: JSON lines with ``split`` (train, test), ``label`` and ``text``; a tenth of train is dev."""
    name = Path(path or "").name.removesuffix(".xz")

    def rows() -> Iterator[Row]:
        for record in _json_lines(_one_file(path), name, "split", "label", "text"):
            if record["split"] not in SPLITS:
                continue  # unlabelled text, for pre-training
            text = record["text"].replace("<br />", " ")
            yield _with_dev(record["split"], text), "", text, "", str(record["label"])

    return _classes(rows(), "sentiments")


def _one_file(path: str | None) -> str:
    (text,) = _files(path, Path(path or "").name).values()
    return text


def _with_dev(split: str, belongs_to: str) -> str:
    """``dev`` for a tenth of what a set gives for training."""
    share = hashlib.sha256(belongs_to.encode()).digest()[0] / 256
    return "dev" if split == "train" and share < _DEV else split


def cuad(path: str | None = None, least: int = 10) -> LabelledSet:
    """CUAD's contracts by type: JSON lines with ``file``, ``type`` and ``text``.

    Args:
        least: types with fewer contracts are left out.
    """

    def rows() -> Iterator[Row]:
        for record in _json_lines(_one_file(path), str(path), "file", "type", "text"):
            yield None, record["file"], record["text"], "", record["type"]

    return _classes(rows(), "types of contract", least)


def csabstruct(path: str | None = None) -> LabelledSet:
    """Roles of sentences: each sentence is asked of its abstract, so that the abstract may be pruned."""
    found = _files(path, "/train.jsonl", "/dev.jsonl", "/test.jsonl")

    def rows() -> Iterator[Row]:
        for name, text in found.items():
            for record in _json_lines(text, f"{path}, {name}", "sentences", "labels"):
                abstract = " ".join(record["sentences"])
                for sentence, label in zip(record["sentences"], record["labels"], strict=True):
                    yield name.strip("/").removesuffix(".jsonl"), "", abstract, sentence, label

    return _classes(rows(), "roles of a sentence")


def books(
    path: str | None = None,
    label: str = "author",
    characters: int = 16_000,
    most_each: int = 8,
    least: int = 3,
    files: list[str] | None = None,
) -> LabelledSet:
    """Excerpts of whole books; the class is the author, or another field. A book is in one split.

    Args:
        path: JSON lines with ``id``, ``text`` and the label's field; a file, or a folder of them.
        characters: of an excerpt.
        most_each: excerpts of one book, spread evenly.
        least: an author needs as many books.
        files: names in the folder; None: all that lie there.
    """
    place = Path(path or ".").expanduser()
    shards = sorted(place.glob("*.jsonl*")) if place.is_dir() else [place]
    if files is not None:
        shards = [place / name for name in files]
    if path is None or not shards:
        raise DataError(f"path: {path} holds no JSON lines")
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for file in shards:
        for record in _json_lines(_one_file(str(file)), file.name, "id", "text", label):
            text, step = record["text"], max(characters, len(record["text"]) // most_each)
            pieces = [text[at : at + characters] for at in range(0, len(text) - characters + 1, step)]
            found.setdefault(str(record[label]), []).append((str(record["id"]), pieces[:most_each]))

    def rows() -> Iterator[Row]:
        for name, of_author in sorted(found.items()):
            if len(of_author) < least:
                continue
            # By rank among the author's books, so that every class has books in every split.
            ranked = sorted(of_author, key=lambda book: hashlib.sha256(book[0].encode()).digest())
            for rank, (identity, pieces) in enumerate(ranked):
                split = "test" if rank == 0 else "dev" if rank == 1 and len(ranked) > 3 else "train"
                for piece in pieces:
                    yield split, identity, piece, "", name

    return _classes(rows(), f"{label}s")


_NAMES = "Nora Otto Petra Quinn Rosa Silas Tilda Urban Vera Wanda Xaver Yara Anton Berta Clara David"
_CODES = "amber birch coral delta ember frost grove hazel ivory jade karma lemon"


def facts(
    path: str | None = None, examples: int = 20_000, characters: int = 2000, facts: int = 6, classes: int = 8
) -> LabelledSet:
    """Sparse evidence: short facts planted in long text, and a question that names one of them.

    "The code of Nora is amber." stands somewhere among other such facts; asked for Nora, the class is amber.

    Args:
        path: text or JSON lines to plant in; None: the Python standard library's help and sources.
        examples: of all splits together.
        facts: planted in each example, of different names and with codes at random.
        classes: how many codes there are.
    """
    names, codes = _NAMES.split(), _CODES.split()[:classes]
    if not 1 <= facts <= len(names) or not 2 <= classes <= len(codes):
        raise DataError(f"facts: 1 to {len(names)} of them, and 2 to 12 classes")
    if path is None:
        pool = "\n".join(document.data.decode() for document in StdlibSource().documents())
    else:
        pool = _one_file(path)
        if ".jsonl" in path:
            pool = "\n".join(record["text"] for record in _json_lines(pool, path, "text"))
    if len(pool) < 10 * characters:
        raise DataError(f"{path}: {len(pool):,} characters are too few to plant facts in")

    def rows() -> Iterator[Row]:
        for number in range(examples):
            draw = _Draw(f"facts {number}")
            start = draw.below(len(pool) - characters)
            text = pool[start : start + characters]
            chosen = draw.sample(names, facts)
            told = [codes[draw.below(classes)] for _ in chosen]
            for at, name, code in sorted(
                ((draw.below(len(text)), n, c) for n, c in zip(chosen, told, strict=True)), reverse=True
            ):
                text = f"{text[:at]} The code of {name} is {code}. {text[at:]}"
            yield None, f"facts {number}", text, f"What is the code of {chosen[0]}?", told[0]

    return _classes(rows(), "codes that a text tells")


class _Draw:
    """Numbers from a name, the same in every version of Python."""

    def __init__(self, name: str):
        self._name, self._count = name, 0

    def below(self, limit: int) -> int:
        self._count += 1
        digest = hashlib.sha256(f"{self._name} {self._count}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % limit

    def sample(self, values: list[str], count: int) -> list[str]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def qasper(path: str | None = None) -> LabelledSet:
    """Questions to papers whose answer stands in the text word for word (LEval's sample of QASPER).

    JSON lines with ``input``, ``instructions`` and ``outputs``. The sample shows that questions run; it is
    too small to measure anything.
    """
    text = _one_file(path) if not str(path).endswith(".tar.xz") else _files(path, ".jsonl")[".jsonl"]
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    for record in _json_lines(text, str(path), "input", "instructions", "outputs"):
        document, split = record["input"], _split_of(record["input"])
        for question, answer in zip(record["instructions"], record["outputs"], strict=True):
            at = document.find(answer)
            if at >= 0 and answer:
                splits[split].append(Example(document, question, -1, (at, at + len(answer)), (answer,)))
    if not any(splits.values()):
        raise DataError(f"{path}: no answer stands in its text word for word")
    return LabelledSet(splits)


def hf(
    path: str | None = None,
    config: str | None = None,
    text: str = "text",
    question: str | None = None,
    label: str = "label",
    answers: str | None = None,
    train: str = "train",
    dev: str | None = None,
    test: str = "test",
) -> LabelledSet:
    """A set of Hugging Face's by name, or a folder in its layout.

    Args:
        path, config: of ``datasets.load_dataset``.
        text, question, label: names of fields; a label may be a number or a word.
        answers: for extractive questions, the field of SQuAD's ``{text, answer_start}`` instead of a label.
        train, dev, test: names of splits; without ``dev`` a tenth of train is it.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError("reader hf needs the library `datasets`; pip install -e '.[hf]'") from error
    if path is None:
        raise DataError("path: the name of a set of Hugging Face's, or a folder in its layout")
    wanted = {"train": train, "test": test} | ({"dev": dev} if dev else {})
    loaded = {}
    for split, name in wanted.items():
        try:
            loaded[split] = datasets.load_dataset(path, config, split=name)
        except Exception as error:  # of the network, of the hub, of the layout
            reason = str(error).strip().split("\n")[0]
            raise DataError(f"path: {path}, split {name}, cannot be loaded ({reason})") from error
        fields = [text, *filter(None, (question, answers or label))]
        for name in fields:
            if name not in loaded[split].column_names:
                has = ", ".join(loaded[split].column_names)
                raise DataError(f"path: {path} has no field {name!r}, but {has}")
    if answers:
        return _hf_answers(loaded, text, question, answers, dev)
    feature = loaded["train"].features[label]

    def rows() -> Iterator[Row]:
        for split, table in loaded.items():
            for record in table:
                value = record[label]
                name = feature.names[value] if hasattr(feature, "names") else str(value)
                asked = record[question] if question else ""
                where = split if dev else _with_dev(split, record[text])
                yield where, "", record[text], asked, name

    return _classes(rows(), f"values of {label}")


def _hf_answers(loaded: dict[str, Any], text: str, question: str | None, answers: str, dev: str | None):
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    for split, table in loaded.items():
        for record in table:
            given = record[answers]
            if not given["text"]:
                continue
            start = given["answer_start"][0]
            answer = (start, start + len(given["text"][0]))
            where = split if dev else _with_dev(split, record[text])
            example = Example(record[text], record[question or "question"], -1, answer, tuple(given["text"]))
            splits[where].append(example)
    return LabelledSet(splits)


READERS: dict[str, Callable[..., LabelledSet]] = {
    "stdlib": stdlib,
    "sst2": sst2,
    "imdb": imdb,
    "cuad": cuad,
    "csabstruct": csabstruct,
    "books": books,
    "facts": facts,
    "qasper": qasper,
    "hf": hf,
}
