"""Runs downstream tasks on a model: ``python -m acp_repro.evaluate MODEL --tasks piqa,lambada_openai``.

MODEL is a FoX checkpoint folder in the authors' format, or a run folder such as runs/cpu/NAME. The tasks and
their scores are those of the LM Evaluation Harness. The command saves the result of each finished task, so an
interrupted evaluation resumes with the remaining tasks.
"""

import argparse
from pathlib import Path

from .common.command import (
    DEFAULT_CONTEXT_LENGTH,
    checkpoint_parser,
    choose_device,
    command,
    existing,
    positive,
    run_command,
)
from .explorer.checkpoint import Checkpoint
from .pipeline.evaluation.catalogue import BOOK_TASKS, PAPER_TASKS, check_tokenizer

OUTPUT = Path("runs/evaluations")


@command("the same command, without --force, continues where it was", extra="eval")
def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    Checkpoint(options.model)  # before torch is imported
    device = choose_device(options.device)

    from .pipeline.data.text_checkpoint import TextCheckpoint
    from .pipeline.evaluation.evaluation import evaluate, harness_model, identity, print_results
    from .pipeline.evaluation.tasks import load_tasks

    checkpoint = TextCheckpoint(options.model)
    tokenizer = checkpoint.require_tokenizer()
    check_tokenizer(tokenizer.vocab_size, checkpoint.config.vocab_size, str(checkpoint.folder))
    tasks, notes = load_tasks(options.tasks, options.data_dir)
    length = options.context_length or checkpoint.context_length or DEFAULT_CONTEXT_LENGTH
    notes.append(f"the context is {length} tokens (--context-length)")
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
        again=options.force,
        say=print,
    )
    print_results(results)
    print(f"every item: {kept.resolve()}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("evaluate", __doc__)
    add = parser.add_argument
    add(
        "--tasks",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        default=list(PAPER_TASKS),
        metavar="NAME,...",
        help=f"default: the paper's, {','.join(PAPER_TASKS)}; also {' and '.join(BOOK_TASKS)}, which need no "
        "data, and from the Hub any other of the harness",
    )
    add(
        "--data-dir",
        type=existing,
        metavar="FOLDER",
        help="folder with the tasks' files (default: from the Hub)",
    )
    add("--items", type=positive, metavar="N", help="evaluate only the first N items of each task")
    add(
        "--context-length",
        type=positive,
        metavar="N",
        help=f"tokens (default: the run's, else {DEFAULT_CONTEXT_LENGTH})",
    )
    add("--exact", action="store_true", help="evaluate the same weights without pruning")
    add("--output", type=Path, metavar="FOLDER", help=f"folder of the results (default: {OUTPUT}/NAME)")
    add("--force", action="store_true", help="delete the saved results of these tasks and evaluate again")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
