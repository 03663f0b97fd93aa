"""Which heads of a model are local: ``python -m acp_repro.inspect PATH [--text FILE]``.

PATH is a FoX checkpoint folder in the authors' format, or a run folder such as runs/cpu/NAME. Prints
every head with its share of pruned blocks, its window and its gates, and a summary of the layers.
"""

from __future__ import annotations

import argparse
import math

from .chain.command import choose_device, command, output_file, positive, run_command
from .common import files
from .common.errors import UsageError

DEFAULT_CONTEXT_LENGTH = 4096  # the paper's shortest, and that of its Figures 4 to 6
DEFAULT_TOKENS = 32_768
BATCH_TOKENS = 8192


@command()
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        from tqdm import tqdm

        from .model import load_pretrained
        from .papers.acp.checkpoint_folder import Checkpoint
        from .papers.acp.heads import inspect_heads
        from .papers.acp.heads_table import print_heads
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; pip install -e '.[inspect]'") from None
    device = choose_device(options.device)
    checkpoint = Checkpoint.find(options.path)
    length = options.context_length or checkpoint.context_length or DEFAULT_CONTEXT_LENGTH
    try:
        input_ids = checkpoint.input_ids(
            length, options.tokens, text=options.text, token_ids=options.token_ids
        )
        model = load_pretrained(checkpoint.folder, device=device)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    batches = tqdm(input_ids.split(max(1, BATCH_TOKENS // length)), unit="batch", leave=False, disable=None)
    heads = inspect_heads(
        model,
        (batch.to(device) for batch in batches),
        log_pruning_tolerance=options.log_pruning_tolerance,
        dtype=checkpoint.dtype or ("bfloat16" if device.type == "cuda" else "float32"),
    )
    print(f"text: {checkpoint.source(options.text, options.token_ids)}")
    print_heads(str(checkpoint.folder), heads, options.sort)
    if options.csv:
        files.write_text(options.csv, heads.to_csv(index=False))
        print(f"csv     {options.csv.resolve()}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, details = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.inspect", description=summary.split(":")[0] + ". " + details
    )
    add = parser.add_argument
    add("path", metavar="PATH", help="a checkpoint folder, or a run folder")
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--text",
        metavar="FILE",
        help="a text file, .jsonl or folder (default: the "
        "run's held-out text, else the book that comes with the project)",
    )
    text.add_argument("--token-ids", metavar="FILE.npy", help="integers instead of text, fed as they are")
    add(
        "--context-length",
        type=positive,
        metavar="N",
        help=f"tokens a sequence (default: the run's, else {DEFAULT_CONTEXT_LENGTH})",
    )
    add(
        "--tokens",
        type=positive,
        metavar="N",
        default=DEFAULT_TOKENS,
        help="look at no more than this many tokens (default: %(default)s)",
    )
    add(
        "--log-pruning-tolerance",
        type=_negative,
        metavar="X",
        help="log epsilon (default: the model's own, or -10 if it is exact)",
    )
    add("--sort", choices=("pruned", "layer"), default="pruned", help="order of the heads")
    add("--csv", type=output_file, metavar="FILE", help="also write every column there")
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    return parser.parse_args(arguments)


def _negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not -math.inf < value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not the logarithm of an epsilon under 1")
    return value


if __name__ == "__main__":
    run_command(main)
