"""Runs downstream tasks on a model: ``python -m acp_repro.evaluate PATH --tasks piqa,lambada_openai``.

PATH is a FoX checkpoint folder in the authors' format, or a run folder such as runs/cpu/NAME. The tasks and
their scores are those of the LM Evaluation Harness. The result of each finished task is kept, so the same
command continues with the others after a stop.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .common.command import choose_device, command, positive, run_command
from .common.errors import UsageError, UserError
from .pipeline.papers.acp.checkpoint_options import DEFAULT_CONTEXT_LENGTH, checkpoint_parser
from .pipeline.papers.acp.evaluation.catalogue import BOOK_TASKS, PAPER_TASKS, check_tokenizer

OUTPUT = Path("runs/evaluations")


@command("the same command, without --again, continues where it was")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.output and options.output.exists() and not options.output.is_dir():
        raise UsageError(f"--output: {options.output} is a file; give a folder")
    from .pipeline.papers.acp.checkpoint_folder import Checkpoint

    device = choose_device(options.device)
    checkpoint = Checkpoint.find(options.checkpoint)
    try:
        from .pipeline.papers.acp.evaluation.evaluation import (
            evaluate,
            harness_model,
            identity,
            print_results,
        )
        from .pipeline.papers.acp.evaluation.tasks import load_tasks
    except ModuleNotFoundError as error:
        raise UserError(
            f"the tasks need the LM Evaluation Harness ({error}); make .venv/installed-eval"
        ) from None
    tokenizer = _tokenizer(checkpoint, options.tokenizer)
    whose = options.tokenizer or str(checkpoint.folder)
    check_tokenizer(tokenizer.vocab_size, checkpoint.config.vocab_size, whose)
    tasks, notes = load_tasks(options.tasks, options.data_dir)
    if tokenizer.vocab_size < checkpoint.config.vocab_size:
        notes.append(
            f"{whose}: the tokenizer has {tokenizer.vocab_size} token ids and the model "
            f"{checkpoint.config.vocab_size}; correct if the model's number was rounded up"
        )
    length = _context_length(checkpoint.context_length, options.context_length, notes)
    for note in notes:
        print(f"note: {note}")
    model = checkpoint.load(device, **({"log_pruning_tolerance": None} if options.exact else {}))
    lm = harness_model(model, tokenizer, max_length=length, dtype=checkpoint.autocast_dtype(device))
    kept = options.output or OUTPUT / "-".join(checkpoint.folder.resolve().parts[-2:])
    results = evaluate(
        lm,
        tasks,
        items=options.items,
        kept=kept,
        identity=identity(model, checkpoint.weights_sha256),
        again=options.again,
        say=print,
    )
    print_results(results)
    print(f"every item: {kept.resolve()}")
    return 0


def _tokenizer(checkpoint, path: str | None):
    from .pipeline.data import BPETokenizer
    from .pipeline.data.tokenizer import read_json

    if path is not None:
        return BPETokenizer(read_json(path), where=path)
    return checkpoint.own_tokenizer("give the model's: --tokenizer FILE")


def _context_length(trained: int | None, asked: int | None, notes: list[str]) -> int:
    """The context to evaluate at; adds remarks for the user to ``notes``."""
    length = asked or trained or DEFAULT_CONTEXT_LENGTH
    if asked is None and trained is None:
        notes.append(
            f"the checkpoint does not name its training context; {length} tokens are used (--context-length)"
        )
    elif trained is not None and length > trained:
        notes.append(
            f"a context of {length} tokens is longer than the {trained} that the model was trained with"
        )
    return length


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("evaluate", __doc__, "PATH")
    add = parser.add_argument
    add(
        "--tasks",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        default=list(PAPER_TASKS),
        metavar="NAME,...",
        help=f"default: the paper's, {','.join(PAPER_TASKS)}; also {' and '.join(BOOK_TASKS)}, which need no "
        "data, and from the Hub any other of the harness",
    )
    add("--data-dir", metavar="FOLDER", help="folder with the tasks' files (default: from the Hub)")
    add("--items", type=positive, metavar="N", help="evaluate only the first N items of each task")
    add("--tokenizer", metavar="FILE", help="tokenizer.json of the model (default: the checkpoint's)")
    add(
        "--context-length",
        type=positive,
        metavar="N",
        help=f"tokens (default: the run's, else {DEFAULT_CONTEXT_LENGTH})",
    )
    add("--exact", action="store_true", help="evaluate the same weights without pruning")
    add("--output", type=Path, metavar="FOLDER", help=f"where results are kept (default: {OUTPUT}/NAME)")
    add("--again", action="store_true", help="delete the kept results of these tasks, and start again")
    options = parser.parse_args(arguments)
    if not options.tasks:
        parser.error("--tasks: name at least one task")
    return options


if __name__ == "__main__":
    run_command(main)
