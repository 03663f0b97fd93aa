"""Trains the runs of a suite: ``python -m acp_repro.train --suite cpu [--run NAME]``.

Finished runs are skipped. Ctrl-C or SIGTERM writes a checkpoint after the present step, and the same command
resumes from this checkpoint. A second Ctrl-C stops at once.

On a CPU each run uses one core, and several runs are trained concurrently. On GPUs ``--jobs N`` trains N runs
concurrently, on one GPU or several. ``--nproc N`` trains one run on N GPUs of a machine. On several machines
use ``torchrun ... -m -- acp_repro.train --suite S --run NAME`` (without ``--`` torchrun reads ``--run`` as
its own option).
"""

import argparse
import os
import sys

from .common.command import choose_device, command, described_parser, positive, run_command
from .common.errors import UsageError
from .pipeline import planner
from .pipeline.errors import SuiteError
from .pipeline.freshness import has_weights
from .pipeline.paper import Suite
from .pipeline.run import Run
from .pipeline.suite_file import load_suite


@command(
    "the same command continues from the newest checkpoint, if there is one",
    extra="pipeline",
    smaller="use a smaller micro-batch in the suite file, or fewer --jobs",
)
def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    suite = load_suite(options.suite)
    runs = _wanted(suite, options)
    if suite.weights is not None:
        raise SuiteError(
            f"suite {suite.name} uses existing weights in {suite.weights.folder}/ and trains nothing; train "
            f"such weights with `{runs[0].command}`"
        )

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:  # before torch is imported
        suite.check_text(run for run in runs if not has_weights(run))
    if options.nproc is not None and ranks == 1:
        if options.jobs is not None:
            raise UsageError(
                "--nproc divides each run among GPUs, and --jobs trains several runs concurrently; give "
                "only one"
            )
        return _launch(options, sys.argv[1:] if arguments is None else arguments)

    device = choose_device(options.device)

    import torch

    from .pipeline.training.side_by_side import train_side_by_side

    if ranks == 1 and (device.type == "cpu" or options.jobs is not None):
        devices = [device]
        if device.type == "cuda" and device.index is None:  # no single GPU was named
            devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        for group in planner.training_groups(suite, runs):
            train_side_by_side(suite, group, devices, options.jobs)
        return 0
    ordered = [run for group in planner.training_groups(suite, runs) for run in group]
    return _train_one_by_one(suite, ordered, options)


def _launch(options: argparse.Namespace, arguments: list[str]) -> int:
    """Starts one process per rank on this machine, each of which runs this command, and waits for them."""
    import torch

    from .pipeline.training.distributed import launch_ranks

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device != "cpu" and 0 < gpus < options.nproc:
        raise UsageError(f"--nproc {options.nproc}: this machine has {gpus} GPUs (make: NPROC={gpus})")
    if not gpus and options.device is None:
        raise UsageError(f"--nproc {options.nproc}: no GPU on this machine; omit it, or add --device cpu")
    return launch_ranks(options.nproc, "acp_repro.train", arguments)


def _train_one_by_one(suite: Suite, runs: list[Run], options: argparse.Namespace) -> int:
    from .common.errors import UserError
    from .pipeline.training.distributed import process_group, rank
    from .pipeline.training.trainer import Stopped, train

    with process_group(options.device) as device:
        try:
            for run in runs:
                train(suite.paper, run, device=device)
        except UserError as error:
            # All ranks raise these errors, so that all exit and the process group is destroyed properly.
            if rank() == 0:
                print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except Stopped as stop:  # and this
            if rank() == 0:
                print(f"\nstopped; {stop}", file=sys.stderr)
            return 130
    return 0


def _wanted(suite: Suite, options: argparse.Namespace) -> list[Run]:
    """The named runs and their untrained prerequisites; without names, all runs."""
    chosen = {suite.run(name) for name in options.run or ()}
    chosen.update(planner.missing(suite, chosen))
    return [run for run in suite.runs if run in chosen or not options.run]


def _parser() -> argparse.ArgumentParser:
    parser = described_parser(
        "train",
        __doc__,
        epilog="Run folders are runs/SUITE/NAME; `python -m acp_repro.suite SUITE` lists the names.\n"
        "Each contains run.json (settings), metrics.jsonl (one line per step) and, when done, model/.\n"
        "Three settings under training in the suite's file can change at any time: compile,\n"
        "parallel (auto, ddp, fsdp) and checkpoint_every_seconds.",
    )
    add = parser.add_argument
    add("--suite", default="cpu", help="a name in experiments/ or a YAML file (default: cpu)")
    add("--run", action="append", metavar="NAME", help="only this run (repeatable)")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one; under torchrun, one per rank)")
    add("--nproc", type=positive, metavar="N", help="GPUs per run, on this machine")
    add(
        "--jobs",
        type=positive,
        metavar="N",
        help="concurrent runs (default: on a CPU one per core, else 1); sharing a GPU makes timings "
        "incomparable",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
