"""Prepares a corpus and prints what it holds: python -m acp_repro.data --help."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import yaml

from acp_repro.common.command import command, output_file, run_command
from acp_repro.common.files import write_text
from acp_repro.pipeline.data import DataConfig, DataError, prepare
from acp_repro.pipeline.data.config import DEFAULT_HELDOUT
from acp_repro.pipeline.data.registry import CORPORA

EXPORT = "export-tokenizer"
EXAMPLES = """corpora:
{corpora}

examples:
  python -m acp_repro.data                                     the standard library, as bytes
  python -m acp_repro.data --suite h100                        the corpus of a suite, before its training
  python -m acp_repro.data --tokenizer bpe:4096 --context-length 1024 4096
  python -m acp_repro.data --corpus text --path books/ --heldout books/last.jsonl.xz
  python -m acp_repro.data export-tokenizer FILE --suite h100  its tokenizer.json, to keep or commit

A corpus that is already in the cache is only checked and opened.""".format(
    corpora="\n".join(f"  {name:16} {of.what}" for name, of in CORPORA.items())
)


def parse(argv: list[str]) -> argparse.Namespace:
    exporting = argv[:1] == [EXPORT]
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.data" + (f" {EXPORT}" if exporting else ""),
        description="Write the tokenizer of a corpus to a file: set tokenizer: {file: PATH} to use it."
        if exporting
        else "Tokenise a corpus into the cache, and print its documents, bytes and tokens.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if exporting:
        parser.add_argument("file", type=output_file, metavar="FILE", help="the tokenizer.json to write")
    parser.add_argument(
        "--suite", metavar="NAME", help="take the data settings of experiments/NAME.yaml (or of a .yaml file)"
    )
    keys = parser.add_argument_group("data settings, without --suite (see DataConfig)")
    keys.add_argument("--corpus", metavar="NAME", help=f"{', '.join(CORPORA)} (default: stdlib)")
    keys.add_argument("--path", nargs="+", help="files or folders of the corpus, or a dataset")
    keys.add_argument("--text-field", metavar="NAME", help="the field that holds the text (default: text)")
    keys.add_argument(
        "--heldout",
        nargs="+",
        metavar="SHARE|PATH",
        help=f"share of documents to hold out (default: {DEFAULT_HELDOUT}; the end of one), or files",
    )
    keys.add_argument(
        "--tokenizer", metavar="bytes|gpt2|bpe:SIZE|file:PATH", help="how text becomes ids (default: bytes)"
    )
    keys.add_argument("--config", help="for hf: the dataset's configuration")
    keys.add_argument("--split", help="for hf: the dataset's split (default: train)")
    keys.add_argument("--max-documents", type=int, metavar="N", help="for hf: fetch this many documents")
    keys.add_argument(
        "--options", nargs="+", metavar="NAME=VALUE", help="other options of the corpus, such as least=2"
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
        "--workers", type=int, metavar="N", help="threads that tokenise (default: one a core)"
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help="the cache folder (default: $ACP_REPRO_CACHE, else cache/ in the project folder)",
    )
    args = parser.parse_args(argv[exporting:])
    args.exporting = exporting
    return args


def config_of(args: argparse.Namespace) -> DataConfig:
    names = ("corpus", "path", "text_field", "heldout", "tokenizer", "config", "split")
    given = {n: getattr(args, n) for n in (*names, "max_documents") if getattr(args, n) is not None}
    if args.suite is not None:
        if given:
            raise DataError(f"--suite sets the data; leave out --{min(given).replace('_', '-')}")
        return _of_suite(args.suite)
    if args.options:
        pairs = (option.partition("=") for option in args.options)
        try:
            given["options"] = {name: yaml.safe_load(value) for name, _, value in pairs}
        except Exception as error:  # PyYAML lets many kinds through
            raise DataError(f"--options: not valid YAML ({' '.join(str(error).split())})") from None
    if len(given.get("path", ())) == 1:
        given["path"] = given["path"][0]
    if len(given.get("heldout", ())) == 1:
        given["heldout"] = yaml.safe_load(given["heldout"][0])
    kind, _, rest = given.get("tokenizer", "").partition(":")
    if kind == "bpe" and rest.isdecimal():
        given["tokenizer"] = {"bpe": int(rest)}
    elif kind == "file":
        given["tokenizer"] = {"file": rest}
    return DataConfig(**given)


def _of_suite(name: str) -> DataConfig:
    # Only the section `data`: acp_repro.suite reads the whole file, and this package may not import it.
    path = Path(name) if name.endswith(".yaml") else Path("experiments") / f"{name}.yaml"
    try:
        settings = yaml.safe_load(path.read_text("utf-8"))["data"]
    except Exception as error:  # PyYAML lets many kinds through
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: no YAML file with a section `data` here ({reason})") from None
    return DataConfig.from_dict(settings)


@command("nothing of this corpus was kept", extra="chain")
def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    corpus = prepare(config_of(args), args.cache_dir, args.workers)
    if args.exporting:
        return _export(corpus, args.file)
    counts = {n: corpus.describe(n)["splits"].values() for n in args.context_length}
    facts = corpus.describe()
    print(f"corpus      {facts['corpus']}, text {facts['identity'][:16]}")
    print(f"tokenizer   {facts['tokenizer']}, {facts['vocab_size']} ids with BOS")
    print(f"folder      {corpus.folder}")
    print(f"\n{'':20}{'train':>14}{'heldout':>14}")
    for row in ("documents", "bytes", "tokens", "longest"):
        label = "longest document" if row == "longest" else row
        if all(row in split for split in facts["splits"].values()):
            numbers = [f"{split[row]:14,}" for split in facts["splits"].values()]
            print(f"{label:20}" + "".join(numbers))
    for length, splits in counts.items():
        print(f"{f'sequences of {length}':20}" + "".join(f"{s['sequences']:14,}" for s in splits))
        print(f"{'  share of tokens':20}" + "".join(f"{s['share_used']:14.1%}" for s in splits))
    return 0


def _export(corpus: Any, file: Path) -> int:
    if corpus.config.tokenizer == "bytes":
        raise DataError("tokenizer: bytes have no tokenizer.json to export")
    write_text(file, corpus.tokenizer.json_text)
    print(f"{file}: {corpus.vocab_size} ids with BOS; use it with tokenizer: {{file: {file}}}")
    return 0


if __name__ == "__main__":
    run_command(main)
