"""Options of commands that open a checkpoint: the folder, a text, log epsilon, a device. Needs no torch."""

from __future__ import annotations

import argparse
import math

from acp_repro.common.command import described_parser, positive

DEFAULT_CONTEXT_LENGTH = 4096  # the paper's shortest, and that of its Figures 4 to 6
WHAT = "a checkpoint folder, or a run folder"


def checkpoint_parser(name: str, doc: str, metavar: str = "CHECKPOINT") -> argparse.ArgumentParser:
    """The parser of a command that opens one checkpoint, ``options.checkpoint``."""
    parser = described_parser(name, doc)
    parser.add_argument("checkpoint", metavar=metavar, help=WHAT)
    parser.add_argument("--device", help="cpu, cuda (default: a GPU if there is one)")
    return parser


def add_text_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options for :meth:`Checkpoint.input_ids`."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--text",
        metavar="FILE",
        help="a text file, .jsonl or folder (default: the run's held-out text, else the book that comes with "
        "the project)",
    )
    text.add_argument("--token-ids", metavar="FILE.npy", help="a file of token ids, instead of text")
    parser.add_argument(
        "--length",
        "--context-length",
        dest="context_length",
        type=positive,
        metavar="N",
        help=f"tokens a sequence (default: the run's, else {DEFAULT_CONTEXT_LENGTH})",
    )


def log_epsilon(text: str) -> float:
    """The type of ``--log-pruning-tolerance``.

    Raises:
        argparse.ArgumentTypeError: it is not a finite number below 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not -math.inf < value < 0:
        raise argparse.ArgumentTypeError(
            f"{text} is not log(epsilon), a finite number below 0; the paper uses -10"
        )
    return value
