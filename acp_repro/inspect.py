"""Shows which heads of a model are local: ``python -m acp_repro.inspect PATH [--text FILE] [--html PAGE]``.

PATH is a FoX checkpoint folder in the authors' format, or a run folder such as runs/cpu/NAME. Prints every
head with its share of pruned blocks, its window and its gates, and a summary of the layers. With --html it
also writes a page that shows every head, and which tokens each token attends to; see docs/heads.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from pathlib import Path

from .common import files
from .common.command import choose_device, command, output_file, positive, run_command
from .pipeline.papers.acp.checkpoint_options import (
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

    from .explorer.explorer import Explorer, Seen, check_comparable
    from .explorer.heads import inspect_heads
    from .explorer.heads_table import print_heads
    from .explorer.looking import look
    from .pipeline.papers.acp.checkpoint_folder import Checkpoint, CheckpointNotUsable

    device = choose_device(options.device)
    checkpoint, *others = (Checkpoint.find(p) for p in (options.checkpoint, options.compare) if p)
    for other in others:  # before anything is computed
        check_comparable(checkpoint.name, checkpoint.config, other.name, other.config)
        checkpoint.check_reads_like(other)
    length = options.context_length or checkpoint.context_length or DEFAULT_CONTEXT_LENGTH
    tokens = options.tokens or max(DEFAULT_TOKENS, length)
    if tokens < length:
        raise CheckpointNotUsable(
            f"--tokens {tokens} is less than one sequence of {length}; pass --tokens {length} or more, "
            "or a smaller --length"
        )
    input_ids = checkpoint.input_ids(length, tokens, text=options.text, token_ids=options.token_ids)

    def seen_by(measure, checkpoint):
        batches = input_ids.split(max(1, BATCH_TOKENS // length))
        return measure(
            checkpoint.load(device),
            (batch.to(device) for batch in tqdm(batches, unit="batch", leave=False, disable=None)),
            log_pruning_tolerance=options.log_pruning_tolerance,
            dtype=checkpoint.autocast_dtype(device),
        )

    source = checkpoint.source(options.text, options.token_ids)
    if options.html:
        # A reader of the page does not see the command line, and need not know the machine's folders.
        given = options.token_ids or options.text
        facts = [Path(given).name if given else source.partition(" (--")[0]]
        seen = [Seen(c.name, seen_by(look, c), facts) for c in (checkpoint, *others)]
        tokenizer = None
        with contextlib.suppress(CheckpointNotUsable):  # tokens given as numbers are shown as numbers
            tokenizer = checkpoint.tokenizer
        page = Explorer(*seen, tokenizer=tokenizer)
        heads = seen[0].heads.table.loc[:, :"log_pruning_tolerance"]  # what `inspect_heads` gives
    else:
        heads = seen_by(inspect_heads, checkpoint)
    print(f"text: {source}")
    print_heads(str(checkpoint.folder), heads, options.sort)
    if options.csv:
        files.write_text(options.csv, heads.to_csv(index=False))
        print(f"csv     {options.csv.resolve()}")
    if options.html:
        path = page.save(options.html)
        print(f"html    {path.resolve()} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("inspect", __doc__, "PATH")
    add_text_options(parser)
    add = parser.add_argument
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"read at most this many tokens (default: {DEFAULT_TOKENS}, or one sequence if that is longer)",
    )
    add(
        "--log-pruning-tolerance",
        type=log_epsilon,
        metavar="X",
        help="log epsilon (default: the model's own, or -10 if it is exact)",
    )
    add("--sort", choices=("pruned", "layer"), default="pruned", help="order of the heads (default: pruned)")
    add("--csv", type=output_file, metavar="FILE", help="also write all columns to this file")
    add(
        "--html",
        type=output_file,
        metavar="PAGE",
        help="also write a page that shows every head on the first sequence; it needs no other file",
    )
    add("--compare", metavar="OTHER", help="show a second model of the same shape on that page")
    options = parser.parse_args(arguments)
    if options.compare and not options.html:
        parser.error("--compare shows two models on one page; add --html PAGE")
    named = {"--text": options.text, "--token-ids": options.token_ids, "--csv": options.csv}
    for (one, path), (other, same) in itertools.combinations([*named.items(), ("--html", options.html)], 2):
        if not (path and same) or os.path.realpath(path) != os.path.realpath(same):
            continue
        if Path(same).is_file() or not Path(same).exists():  # a terminal or a pipe takes both
            parser.error(f"{one} and {other} are one file, {path}; write to another")
    return options


if __name__ == "__main__":
    run_command(main)
