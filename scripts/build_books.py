"""Builds the corpus of the GPU suites, 819 public-domain books, and validates every hash.

    python scripts/build_books.py    # clones four repositories into data/clones and writes data/books

Needs git and network access. ``books.tsv.xz`` lists each book's file and the SHA-256 of its text. Do not
change the extraction rules: they produced the corpus of the committed results.
"""

import argparse
import csv
import hashlib
import html
import json
import lzma
import re
import statistics
import subprocess
import sys
from itertools import groupby
from pathlib import Path

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
SHARDS = {  # SHA-256 of the decompressed JSON lines
    "00": "a634ff51657255771d6f55474a60f67aac4c4922cb8bfd31fbde2da7530951b8",
    "01": "6c1b6a4873ff6185cfc6fd90fa018cca6ca626387f4b3c4ed25ef15050c44904",
    "02": "6f7c5a593b1a8b4010aefa9814c7c85d97d412c2e4b2e14c9d29aacbad863cb1",
    "03": "38bc4a623d8275f6f0b9486ac6b32fba45e6df74e79675f2c924849f535510d6",
    "04": "0d96820bfb3d0f0ee7bdb3eef227bd04bc4a3831b14b107bd8210e8f2bc3243e",
    "05": "8d65c1ab11280c6116c14db3f423b2a288816b1bde1cfc6eb65b924537b789c8",
    "06": "68ea18849b020045e78aea740f289480af41a1eba461ae765ed45c3ecc957779",
    "07": "c3f05433b0f0b584638f00bdf684d99ed261dc34cd8f450d84d09512e048c919",
}
WRAPPED = 55  # characters: a paragraph with mostly lines of this length was wrapped to fit a page
START = re.compile(
    r"^.*\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG.*\n|^\*END.?THE SMALL PRINT!.*\*END\*\n",
    re.MULTILINE,
)
END = re.compile(
    r"^.*\*\*\* END OF (?:THE|THIS) PROJECT.*|^.*End of (?:the )?Project Gutenberg.*", re.MULTILINE
)
LATE_END = re.compile(r"^\*\*\*END OF (?:THE|THIS) PROJECT.*", re.MULTILINE)  # matched when lines are joined
CREDIT = re.compile(r"\s*(?:Produced by|E-text prepared|Etext prepared|Transcribed from)")


def unix_lines(text: str) -> str:
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip(" \t") for line in text.split("\n"))


def unwrap(text: str) -> str:
    """Joins the lines of each wrapped paragraph into one line; verse and tables are unchanged."""
    paragraphs = re.sub(r"\n{4,}", "\n\n\n", text).split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        lines = paragraph.split("\n")
        long = len(lines) > 1 and statistics.median(map(len, lines[:-1])) >= WRAPPED
        if long and not any(line.startswith(("    ", "\t")) for line in lines):
            paragraphs[number] = " ".join(line.strip() for line in lines)
    return "\n\n".join(paragraphs)


def from_markdown(text: str) -> str:
    return re.sub(r"^.*?\n-{5,}\n", "", unix_lines(text), count=1, flags=re.DOTALL)


def from_plain(text: str) -> str:
    return unwrap(unix_lines(text).strip() + "\n")


def from_gutenberg(text: str) -> str:
    """The text of a Project Gutenberg e-text without licence, header and credits."""
    text = unix_lines(text)
    if start := START.search(text):
        text = text[start.end() :]
    if end := END.search(text):
        text = text[: end.start()]
    text = text.strip()
    while CREDIT.match(text):
        text = text.partition("\n\n")[2].strip()
    text = unwrap(text + "\n")
    return LATE_END.split(text, maxsplit=1)[0]


def from_tei(text: str) -> str:
    """The text of TEI XML, with a line break after each paragraph, line of verse and division."""
    text = re.search(r"<text\b.*(?=</text>)", text, re.DOTALL).group()
    text = re.sub(r"<note\b.*?</note>", "", text, flags=re.DOTALL)
    text = re.sub(r"<(?:pb|lb|cb|milestone|gap)\b[^>]*>", "", text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"</(?:p|head|l|quote|div|label|trailer)>", "\n\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return "\n".join(line.strip() for line in text.split("\n"))


RULES = dict(zip(REPOSITORIES, (from_markdown, from_tei, from_plain, from_gutenberg), strict=True))


def read_text(data: bytes, source: str) -> str:
    """Extracts the text of a book from the bytes of its file."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    return re.sub(r"\n{4,}", "\n\n\n", RULES[source](text)).strip() + "\n"


def clone(folder: Path) -> None:
    for name, (address, commit) in REPOSITORIES.items():
        if not (folder / name).is_dir():
            subprocess.run(["git", "clone", f"https://github.com/{address}", str(folder / name)], check=True)
            subprocess.run(["git", "-C", str(folder / name), "checkout", "-q", commit], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clones", type=Path, default=Path("data/clones"), help="folder of the four clones")
    parser.add_argument("--out", type=Path, default=Path("data/books"), help="folder of the shards")
    options = parser.parse_args()
    clone(options.clones)
    options.out.mkdir(parents=True, exist_ok=True)
    listed = lzma.decompress(Path(__file__).with_name("books.tsv.xz").read_bytes()).decode().splitlines()
    books = csv.DictReader(listed, delimiter="\t", quoting=csv.QUOTE_NONE)
    for shard, members in groupby(books, lambda book: book["shard"]):
        content = b""
        for book in members:
            text = read_text((options.clones / book["source"] / book["path"]).read_bytes(), book["source"])
            if hashlib.sha256(text.encode()).hexdigest() != book["sha256"]:
                sys.exit(f"error: {book['path']} has another text than at {REPOSITORIES[book['source']]}")
            record = {key: book[key] for key in ("id", "source", "title", "author")} | {"text": text}
            content += json.dumps(record, ensure_ascii=False).encode() + b"\n"
        if hashlib.sha256(content).hexdigest() != SHARDS[shard]:
            sys.exit(f"error: shard {shard} has another SHA-256 than the corpus of the committed results")
        (options.out / f"books_core_{shard}.jsonl.xz").write_bytes(lzma.compress(content, preset=2))
        print(f"books_core_{shard}.jsonl.xz: every hash is right", flush=True)


if __name__ == "__main__":
    main()
