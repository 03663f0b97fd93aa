"""Savings and loss against epsilon: ``python -m acp_repro.sweep_epsilon [--suite S | --checkpoint FOLDER]``.

Of a suite's run, whose records it writes, or of any FoX checkpoint: the share of attention pruned by blocks
and entry by entry, the loss, and the most weight that a row loses, beside epsilon, its bound (Appendix A).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from .measure.__main__ import _is_current
from .measure.epsilon_table import table, write_csv
from .records import RecordError, path_of, read_records, write_records
from .suite import MeasureConfig, load_suite


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)

    import torch

    from .training.loop import TrainingError

    options.device = torch.device(options.device or ("cpu", "cuda")[torch.cuda.is_available()])
    try:
        rows = (_of_checkpoint if options.checkpoint else _of_suite)(options)
    except (ValueError, OSError, ImportError, RecordError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RecordError | TrainingError) else 2
    print(table(rows))
    return 0


def _of_suite(options: argparse.Namespace) -> list[dict]:
    from .measure.epsilon_sweep import measure
    from .measure.trained import TrainedRun

    suite = load_suite(options.suite)
    run = suite.run(options.run) if options.run else suite.sweep_run
    values = options.log_pruning_tolerance or suite.measure.sweep_log_pruning_tolerances
    if not options.again and _is_current(run, "epsilon_sweep"):
        records = read_records(run.suite, "epsilon_sweep", run=run.name)
        if list(records["swept_log_pruning_tolerance"]) == values:
            print(f"{path_of(run.suite, run.name, 'epsilon_sweep')}: up to date")
            return records.to_dict("records")
    config = dataclasses.replace(suite.measure, sweep_log_pruning_tolerances=values)
    rows = measure(trained := TrainedRun.load(run, config, options.device))
    print(
        write_records(
            run,
            "epsilon_sweep",
            rows,
            device=trained.device_name,
            dtype=run.training.dtype,
            trained_tokens=trained.trained_tokens,
            uses_gpu=options.device.type == "cuda",
        )
    )
    return rows


def _of_checkpoint(options: argparse.Namespace) -> list[dict]:
    from .measure.checkpoint import Checkpoint
    from .measure.epsilon_sweep import sweep_checkpoint

    checkpoint = Checkpoint.find(options.checkpoint)
    print(f"text: {checkpoint.source(options.text, options.token_ids)}")
    rows, origin = sweep_checkpoint(
        options.checkpoint,
        options.log_pruning_tolerance or MeasureConfig().sweep_log_pruning_tolerances,
        options.device,
        context_length=options.context_length,
        tokens=options.tokens,
        text=options.text,
        token_ids=options.token_ids,
    )
    if options.csv:
        print(write_csv(options.csv, rows, origin))
    return rows


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m acp_repro.sweep_epsilon", description=__doc__)
    add = parser.add_argument
    add(
        "--log-pruning-tolerance",
        type=float,
        nargs="+",
        metavar="X",
        help="log epsilon, one or more (default: the suite's, or -1 -5 -10 -20 -40)",
    )
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add = parser.add_argument_group("a run of a suite").add_argument
    add("--suite", default="cpu", help="a name in experiments/ (default: cpu)")
    add("--run", metavar="NAME", help="default: the suite's sweep_run")
    add("--again", action="store_true", help="measure anew what is up to date")
    add = parser.add_argument_group("any checkpoint").add_argument
    add("--checkpoint", metavar="FOLDER", help="in the authors' format, or a run folder")
    add("--text", metavar="FILE", help="default: the run's held-out text, or the Python library's")
    add("--token-ids", metavar="FILE.npy", help="integers instead of text")
    add("--context-length", type=int, metavar="N", help="default: the run's, or 4096")
    add("--tokens", type=int, default=32_768, metavar="N", help="at most (default: %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args(arguments)
    if not options.checkpoint and (options.text or options.token_ids or options.csv):
        parser.error("--text, --token-ids and --csv need --checkpoint")
    return options


if __name__ == "__main__":
    sys.exit(main())
