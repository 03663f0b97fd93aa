"""Which heads of a model are local: ``python -m acp_repro.inspect PATH [--text FILE]``.

PATH is a FoX checkpoint folder in the authors' format, or a run folder such as runs/cpu/NAME. Prints
every head with its share of pruned blocks, its window and its gates, and a summary of the layers.
"""

from __future__ import annotations

import argparse

from .chain.command import choose_device, command, output_file, positive, run_command
from .common import files
from .papers.acp.checkpoint_options import (
    DEFAULT_CONTEXT_LENGTH,
    add_text_options,
    checkpoint_parser,
    log_epsilon,
)

DEFAULT_TOKENS = 32_768
BATCH_TOKENS = 8192


@command(extra="inspect")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)

    from tqdm import tqdm

    from .papers.acp.checkpoint_folder import Checkpoint
    from .papers.acp.heads import inspect_heads
    from .papers.acp.heads_table import print_heads

    device = choose_device(options.device)
    checkpoint = Checkpoint.find(options.checkpoint)
    length = options.context_length or checkpoint.context_length or DEFAULT_CONTEXT_LENGTH
    input_ids = checkpoint.input_ids(length, options.tokens, text=options.text, token_ids=options.token_ids)
    model = checkpoint.load(device)
    batches = tqdm(input_ids.split(max(1, BATCH_TOKENS // length)), unit="batch", leave=False, disable=None)
    heads = inspect_heads(
        model,
        (batch.to(device) for batch in batches),
        log_pruning_tolerance=options.log_pruning_tolerance,
        dtype=checkpoint.autocast_dtype(device),
    )
    print(f"text: {checkpoint.source(options.text, options.token_ids)}")
    print_heads(str(checkpoint.folder), heads, options.sort)
    if options.csv:
        files.write_text(options.csv, heads.to_csv(index=False))
        print(f"csv     {options.csv.resolve()}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("inspect", __doc__, "PATH")
    add_text_options(parser)
    add = parser.add_argument
    add(
        "--tokens",
        type=positive,
        metavar="N",
        default=DEFAULT_TOKENS,
        help="look at no more than this many tokens (default: %(default)s)",
    )
    add(
        "--log-pruning-tolerance",
        type=log_epsilon,
        metavar="X",
        help="log epsilon (default: the model's own, or -10 if it is exact)",
    )
    add("--sort", choices=("pruned", "layer"), default="pruned", help="order of the heads")
    add("--csv", type=output_file, metavar="FILE", help="also write every column there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
