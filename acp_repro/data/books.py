"""Builds the books of the suites `h100` and `small`: python -m acp_repro.data.books --help."""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.resources
import io
import json
import lzma
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from acp_repro.common.command import command, run_command
from acp_repro.common.files import replacing
from acp_repro.data import book_texts
from acp_repro.data.files import DataError, open_plain

# The commit of each repository from which the books are known to come.
REPOSITORIES = {
    "classic-books-markdown": (
        "mlschmitt/classic-books-markdown",
        "944882722e9a96fa6cf2739dc2ea757e101f412f",
    ),
    "ELTeC-eng": ("COST-ELTeC/ELTeC-eng", "3db3b6738a836f0e1b276b6c9703e42f4297f978"),
    "100_english_novels": (
        "computationalstylistics/100_english_novels",
        "143e601875d70e195f2cc5ebd8b034609271194d",
    ),
    "gender_novels": ("dhmit/gender_novels", "12345bf977d18137bbbfe9a323323b4e06a47223"),
}
# SHA-256 of the decompressed JSON lines of the shards that the committed records and model were made from.
SHARDS = {
    "00": "a634ff51657255771d6f55474a60f67aac4c4922cb8bfd31fbde2da7530951b8",
    "01": "6c1b6a4873ff6185cfc6fd90fa018cca6ca626387f4b3c4ed25ef15050c44904",
    "02": "6f7c5a593b1a8b4010aefa9814c7c85d97d412c2e4b2e14c9d29aacbad863cb1",
    "03": "38bc4a623d8275f6f0b9486ac6b32fba45e6df74e79675f2c924849f535510d6",
    "04": "0d96820bfb3d0f0ee7bdb3eef227bd04bc4a3831b14b107bd8210e8f2bc3243e",
    "05": "8d65c1ab11280c6116c14db3f423b2a288816b1bde1cfc6eb65b924537b789c8",
    "06": "68ea18849b020045e78aea740f289480af41a1eba461ae765ed45c3ecc957779",
    "07": "c3f05433b0f0b584638f00bdf684d99ed261dc34cd8f450d84d09512e048c919",
}
_PRESET = 2  # of xz: a fifth of the time of the usual 6, for files that are a quarter larger


class Book(NamedTuple):
    """One book of the manifest ``books.tsv.xz``, which lists them in the order of the shards."""

    shard: str
    id: str
    source: str  # the repository's name, a key of `REPOSITORIES`
    title: str
    author: str
    path: str  # of its file in the repository
    sha256: str  # of its text, in UTF-8


def manifest() -> list[Book]:
    """The 819 books of the shards."""
    packed = importlib.resources.files(__package__).joinpath("books.tsv.xz").read_bytes()
    rows = csv.reader(io.StringIO(lzma.decompress(packed).decode()), delimiter="\t", quoting=csv.QUOTE_NONE)
    assert tuple(next(rows)) == Book._fields
    return [Book(*row) for row in rows]


def build(clones: Path, out: Path, books: list[Book] | None = None) -> tuple[list[str], Counter[str]]:
    """Writes ``books_core_00.jsonl.xz`` to 07 into ``out``. A shard that is already there, with the known
    hash, is kept.

    Args:
        clones: the folder with a clone of each of `REPOSITORIES`.
        out: the folder of the shards; it is created.
        books: the manifest, or a part of it.

    Returns:
        The differences from the known shards, a line each; empty if there are none. And how many books were
        ``equal`` to the known text, ``changed``, ``missing`` from the clones, or in shards that were
        ``kept``.

    Raises:
        DataError: a clone is missing; the message holds the commands that make it.
    """
    books = manifest() if books is None else books
    _check_clones(clones, {book.source for book in books})
    shards: dict[str, list[Book]] = {}
    for book in books:
        shards.setdefault(book.shard, []).append(book)
    counts: Counter[str] = Counter()
    differences: list[str] = []
    with tqdm(total=len(books), desc="building shards", unit=" books", disable=None) as bar:
        for shard, members in shards.items():
            path = out / f"books_core_{shard}.jsonl.xz"
            if _content_hash(path) == SHARDS.get(shard):
                counts["kept"] += len(members)
                bar.update(len(members))
                continue
            digest, found = hashlib.sha256(), dict.fromkeys(members, "missing")
            with replacing(path) as temporary, lzma.open(temporary, "wb", preset=_PRESET) as file:
                for line, book, state in _lines(clones, members):
                    found[book] = state
                    digest.update(line)
                    file.write(line)
                    bar.update()
            bar.update(sum(state == "missing" for state in found.values()))
            counts.update(found.values())
            if digest.hexdigest() != SHARDS.get(shard):
                wrong = [f"{b.id} {state}" for b, state in found.items() if state != "equal"]
                differences.append(
                    f"{path.name} is not as known: {len(wrong)} of {len(members)} books differ"
                    + (f" ({', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''})" if wrong else "")
                )
    return differences, counts


def _lines(clones: Path, books: list[Book]) -> Iterator[tuple[bytes, Book, str]]:
    for book in books:
        try:
            data = (clones / book.source / book.path).read_bytes()
        except OSError:
            continue
        try:
            text = book_texts.read(data, book.source)
        except DataError as error:
            raise DataError(f"{clones / book.source / book.path}: {error}") from None
        same = hashlib.sha256(text.encode()).hexdigest() == book.sha256
        record = {"id": book.id, "source": book.source, "title": book.title, "author": book.author}
        line = json.dumps({**record, "text": text}, ensure_ascii=False).encode() + b"\n"
        yield line, book, "equal" if same else "changed"


def _content_hash(path: Path) -> str | None:
    """SHA-256 of the content of an xz file; None if there is no such file, or only a part of one."""
    if not path.exists():
        return None
    try:
        with open_plain(path) as (stream, _):
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except DataError:
        return None


def _check_clones(clones: Path, sources: set[str]) -> None:
    commands = [
        f"git clone https://github.com/{name} {(where := shlex.quote(str(clones / source)))} && "
        f"git -C {where} checkout {commit}"
        for source, (name, commit) in REPOSITORIES.items()
        if source in sources and not (clones / source).is_dir()
    ]
    if commands:
        raise DataError(f"--clones: {len(commands)} missing in {clones}; run: {' && '.join(commands)}")


@command("run it again; complete shards are kept")
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.data.books",
        description="Build the shards of books of suite small and ACP's GPU suites: 819 books in the public "
        "domain, from clones of the repositories that collect them. It takes about two minutes. It reports "
        "whether each shard has the same bytes as the one behind the committed records.",
    )
    parser.add_argument(
        "--clones",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the folder with a clone of each repository; for a missing one, its `git clone` is printed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("data/books"),
        metavar="FOLDER",
        help="folder of the shards (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    differences, counts = build(args.clones, args.out)
    for line in differences:
        print(line)
    print(f"{args.out}: " + ", ".join(f"{count} books {state}" for state, count in sorted(counts.items())))
    if differences:
        pins = ", ".join(f"{name} {commit[:7]}" for name, commit in REPOSITORIES.values())
        print(f"The known shards come from these commits: {pins}")
    else:
        print("Every shard holds the known bytes.")
    return 0


if __name__ == "__main__":
    run_command(main)
