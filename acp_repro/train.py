"""Trains the runs of a suite: ``python -m acp_repro.train --suite cpu [--run NAME]``.

Stopped at any time, the same command goes on from the last checkpoint; what is done is not done again.
On several GPUs: ``torchrun --standalone --nproc-per-node N -m -- acp_repro.train --suite S --run NAME``
(without ``--`` torchrun takes ``--run`` for an option of its own).
"""

from __future__ import annotations

import argparse
import sys

from .suite import SuiteError, load_suite


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        suite = load_suite(options.suite)
        runs = [suite.run(name) for name in options.run] if options.run else suite.runs
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    if suite.weights is not None:
        print(
            f"error: the weights of suite {suite.name} are ready, in {suite.weights.folder}/; "
            f"train such weights anew with `{runs[0].command}`",
            file=sys.stderr,
        )
        return 2

    from .data import DataError
    from .training.checkpoint import CheckpointError
    from .training.distributed import DistributedError, process_group, rank
    from .training.loop import TrainingError, train

    try:
        with process_group(options.device) as device:
            try:
                for run in runs:
                    train(
                        run, device=device, watch_every=options.watch_every, tensorboard=options.tensorboard
                    )
            except (TrainingError, CheckpointError, DistributedError, DataError) as error:
                # All ranks meet these, so all leave, and the process group is left in order.
                if rank() == 0:
                    print(f"error: {error}", file=sys.stderr)
                return 1
    except DistributedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Run folders are runs/SUITE/NAME; `python -m acp_repro.suite SUITE` lists the names.\n"
        "Each holds run.json (what is run), metrics.jsonl (one line a step) and, when done, model/.\n"
        "How to run, and not what, stands in the suite's file under training: compile,\n"
        "parallel (auto, ddp, fsdp) and checkpoint_every_seconds can change at any time.",
    )
    parser.add_argument("--suite", default="cpu", help="a name in experiments/ (default: cpu)")
    parser.add_argument("--run", action="append", metavar="NAME", help="only this run (repeatable)")
    parser.add_argument(
        "--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one; under torchrun one GPU a rank)"
    )
    parser.add_argument(
        "--watch-every",
        type=_positive,
        default=100,
        metavar="STEPS",
        help="steps between looks at the pruned ratio of each layer (default: 100)",
    )
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="write the metrics to RUN/tensorboard too (pip install -e '.[tensorboard]')",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
