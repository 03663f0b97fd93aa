"""Hides a needle in a haystack, for any FoX checkpoint: ``python -m acp_repro.needle MODEL``.

MODEL is a FoX checkpoint folder in the authors' format with a tokenizer.json next to the weights, or a
run folder such as runs/cpu/NAME. The test hides a sentence (the needle) at several depths of texts of several
lengths, and a question at the end asks for the sentence. For each length and depth the command prints the
recall of the needle's words, and the gain: the increase of the correct answer's log-likelihood caused by the
needle.
"""

import argparse
from pathlib import Path

from .common.bounds import Share
from .common.command import (
    DEFAULT_CONTEXT_LENGTH,
    bounded,
    checkpoint_parser,
    choose_device,
    command,
    existing,
    output_file,
    positive,
    run_command,
)
from .common.errors import UsageError
from .explorer.checkpoint import Checkpoint
from .pipeline.data.sources import check_length


@command(extra="pipeline,bpe")
def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    # Before torch is imported:
    longest = Checkpoint(options.model).context_length or DEFAULT_CONTEXT_LENGTH
    check_length(options.haystack, max(options.context_lengths or [longest]), "--haystack")
    if options.csv and options.csv.exists():
        raise UsageError(f"--csv: {options.csv} exists already; give another name, or delete it")
    device = choose_device(options.device)

    import pandas as pd

    from .common.files import write_text
    from .model.generation import use_one_thread_if_small
    from .pipeline.data.text_checkpoint import TextCheckpoint
    from .pipeline.evaluation.catalogue import check_tokenizer
    from .pipeline.needle import trial
    from .pipeline.needle.haystack import checkpoint_haystacks
    from .pipeline.needle.prompt import hide, tokenise_needles

    checkpoint = TextCheckpoint(options.model)
    tokenizer = checkpoint.require_tokenizer()
    check_tokenizer(tokenizer.vocab_size, checkpoint.config.vocab_size, str(checkpoint.folder))
    needles = tokenise_needles(tokenizer.encode, tokenizer.bos_id, options.mode)
    lengths = sorted(set(options.context_lengths or ())) or trial.default_lengths(needles, longest, 5)
    haystacks = checkpoint_haystacks(checkpoint, options.haystack, max(lengths), options.samples)
    model = checkpoint.load(device, **({"log_pruning_tolerance": None} if options.exact else {}))
    if options.exact and checkpoint.config.log_pruning_tolerance is None:
        raise UsageError(f"--exact: {checkpoint.folder} prunes nothing; leave the option out")
    depths = list(dict.fromkeys(options.depths or ())) or [0, 0.25, 0.5, 0.75, 1]
    use_one_thread_if_small(model)
    held_out = checkpoint.run and checkpoint.source()
    haystack = options.haystack and str(Path(options.haystack).resolve())
    source = haystack or held_out or "a book that comes with the project"
    print(f"haystack: {source}")
    rows = trial.try_needle(
        model,
        hide(needles, haystacks),
        lengths,
        depths,
        decode=tokenizer.decode,
        dtype=checkpoint.autocast_dtype(device),
        batch_tokens=options.batch_tokens,
        description="needle",
    )
    table = pd.DataFrame(rows)
    print(trial.needle_table(table))
    if options.csv:
        table = table.assign(
            checkpoint=str(checkpoint.folder.resolve()),
            method="exact" if model.config.log_pruning_tolerance is None else "acp",
            mode=options.mode,
            haystack=source,
        )
        write_text(options.csv, table.to_csv(index=False))
        print(f"csv: {options.csv.resolve()}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("needle", __doc__)
    add = parser.add_argument
    add(
        "--context-lengths",
        type=positive,
        nargs="+",
        metavar="TOKENS",
        help=f"context lengths (default: 5, up to the run's, else up to {DEFAULT_CONTEXT_LENGTH})",
    )
    add(
        "--depths",
        type=bounded(Share),
        nargs="+",
        metavar="X",
        help="depths of the needle, 0 to 1 (default: 0 0.25 0.5 0.75 1)",
    )
    add(
        "--samples",
        type=positive,
        default=3,
        metavar="N",
        help="haystacks of each length (default: %(default)s)",
    )
    add(
        "--haystack",
        type=existing,
        metavar="FILE|FOLDER",
        help="text around the needle (default: the run's held-out text, else a book of the project)",
    )
    add(
        "--mode",
        choices=("easy", "standard", "facts"),
        default="easy",
        help="easy: the prompt begins the answer; standard: the model gives the whole answer; facts: "
        "like easy, with 24 different facts (default: %(default)s)",
    )
    add("--exact", action="store_true", help="evaluate the same weights without pruning")
    add(
        "--batch-tokens",
        type=positive,
        default=8192,
        metavar="N",
        help="tokens in a batch (default: %(default)s)",
    )
    add("--csv", type=output_file, metavar="FILE", help="also write every answer to this new file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
