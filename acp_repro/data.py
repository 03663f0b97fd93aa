"""Prepares a corpus and prints a summary: ``python -m acp_repro.data --suite cpu``.

The command tokenises the corpus of a suite of ACP, or of settings like those under ``data:``, into the cache.
If the cache already contains the corpus, the command only verifies and opens it. The command prints the
folder of a trained tokenizer.json; set ``tokenizer: {file: PATH}`` to use this tokenizer.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from .common.command import command, described_parser, imports_of, positive, run_command
from .common.errors import UsageError
from .pipeline.errors import SuiteError
from .pipeline.strict_yaml import build, parse_yaml
from .pipeline.suite_file import load_suite

with imports_of("pipeline"):
    from .pipeline.data import DataConfig, prepare
    from .pipeline.data.corpora import CORPORA

EPILOG = """corpora:
{}

examples:
  python -m acp_repro.data --suite h100
  python -m acp_repro.data '{{corpus: text, path: README.md, tokenizer: gpt2}}' --context-lengths 256"""


@command("nothing of this corpus was kept", extra="pipeline")
def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if options.suite is None:
        config = build(DataConfig, options.settings, Path("SETTINGS"))
    else:
        config = getattr(load_suite(options.suite).file, "data", None)
    if not isinstance(config, DataConfig):
        raise UsageError(f"--suite {options.suite}: only suites of ACP have text to tokenise ahead")
    corpus = prepare(config)
    facts = corpus.describe()
    print(f"corpus      {facts['corpus']}, text {facts['identity'][:16]}")
    print(f"tokenizer   {facts['tokenizer']}, {facts['vocab_size']} ids with BOS")
    print(f"folder      {corpus.folder}")
    print(f"\n{'':20}{'train':>14}{'heldout':>14}")
    rows = {"documents": "documents", "bytes": "bytes", "tokens": "tokens", "longest": "longest document"}
    for key, label in rows.items():
        if key in facts["splits"]["train"]:
            print(f"{label:20}" + "".join(f"{split[key]:14,}" for split in facts["splits"].values()))
    for length in options.context_lengths:
        splits = corpus.describe(length)["splits"].values()
        print(f"{f'sequences of {length}':20}" + "".join(f"{s['sequences']:14,}" for s in splits))
        print(f"{'  share of tokens':20}" + "".join(f"{s['share_used']:14.1%}" for s in splits))


def read_mapping(text: str) -> dict[str, Any]:
    """The type of an argument that is a mapping in YAML."""
    try:
        return parse_yaml(text, Path("SETTINGS"))
    except SuiteError:
        raise argparse.ArgumentTypeError(
            f"{text} is not a mapping in YAML, such as {{corpus: stdlib}}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    epilog = EPILOG.format("\n".join(f"  {name:16} {of.summary}" for name, of in CORPORA.items()))
    parser = described_parser("data", __doc__, epilog=epilog)
    add = parser.add_argument
    add(
        "settings",
        nargs="?",
        type=read_mapping,
        default={},
        help="{corpus: ..., ...}; default: the library's text",
    )
    add("--suite", metavar="NAME", help="a name in experiments/ or a YAML file, instead of settings")
    add(
        "--context-lengths",
        nargs="+",
        type=positive,
        default=[1024, 2048, 4096],
        metavar="TOKENS",
        help="also count sequences of these lengths (default: 1024 2048 4096)",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
