"""Prepare a corpus and print what is there: python -m acp_repro.data --help."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from acp_repro.data import CorruptEntry, DataConfig, DataError, prepare

EXAMPLES = """examples:
  python -m acp_repro.data                                     the standard library, as bytes
  python -m acp_repro.data --tokenizer bpe:4096 --context-length 1024 4096
  python -m acp_repro.data --corpus text --path books/ --heldout books/last.jsonl.xz

A corpus that is in the cache already is only opened."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.data",
        description="Tokenise a corpus into the cache, and print its documents, bytes and tokens.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = DataConfig()
    parser.add_argument(
        "--corpus",
        default=defaults.corpus,
        metavar="NAME",
        help="stdlib: the running Python's standard library (default); text: the files at --path",
    )
    parser.add_argument(
        "--path",
        help="for text: a file or a folder; plain text or .jsonl, each also .xz, .zst, .gz",
    )
    parser.add_argument(
        "--text-field",
        default=defaults.text_field,
        metavar="NAME",
        help="the field of .jsonl files that holds the text (default: %(default)s)",
    )
    parser.add_argument(
        "--heldout",
        nargs="+",
        default=[str(defaults.heldout)],
        metavar="SHARE|PATH",
        help="share of documents to hold out (default: "
        "%(default)s), or, for text, the files to hold out",
    )
    parser.add_argument(
        "--tokenizer",
        default=defaults.tokenizer,
        metavar="bytes|bpe:SIZE",
        help="how text becomes ids (default: %(default)s)",
    )
    parser.add_argument(
        "--context-length",
        nargs="+",
        type=int,
        default=[1024, 2048, 4096],
        metavar="TOKENS",
        help="also count sequences of these lengths (default: 1024 2048 4096)",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help="the cache folder (default: $ACP_REPRO_CACHE, else cache/ in the project folder)",
    )
    parser.add_argument("--verify", action="store_true", help="hash the cached files again")
    return parser.parse_args(argv)


def config_of(args: argparse.Namespace) -> DataConfig:
    heldout: Any = args.heldout
    if len(heldout) == 1:
        try:
            heldout = float(heldout[0])
        except ValueError:
            heldout = heldout[0]
    kind, _, size = args.tokenizer.partition(":")
    tokenizer = {"bpe": int(size)} if kind == "bpe" and size.isdecimal() else args.tokenizer
    return DataConfig(args.corpus, args.path, args.text_field, heldout, tokenizer)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        corpus = prepare(config_of(args), args.cache_dir)
        if args.verify:
            corpus.verify()
        counts = {n: corpus.describe(n)["splits"].values() for n in args.context_length}
    except (DataError, CorruptEntry) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    facts = corpus.describe()
    print(f"corpus      {facts['corpus']}, text {facts['identity'][:16]}")
    print(f"tokenizer   {facts['tokenizer']}, {facts['vocab_size']} ids with BOS")
    print(f"cached in   {corpus.folder}{' (verified)' if args.verify else ''}")
    print(f"\n{'':20}{'train':>14}{'heldout':>14}")
    for row in ("documents", "bytes", "tokens", "longest"):
        label = "longest document" if row == "longest" else row
        print(f"{label:20}" + "".join(f"{split[row]:14,}" for split in facts["splits"].values()))
    for length, splits in counts.items():
        print(f"{f'sequences of {length}':20}" + "".join(f"{s['sequences']:14,}" for s in splits))
        print(f"{'  share of tokens':20}" + "".join(f"{s['share_used']:14.1%}" for s in splits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
