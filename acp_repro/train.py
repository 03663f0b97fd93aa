"""Trains the runs of a suite: ``python -m acp_repro.train --suite cpu [--run NAME]``.

Stopped at any time, the same command goes on from the last checkpoint; what is done is not done again.
"""

from __future__ import annotations

import argparse
import sys

from .suite import SuiteError, load_suite


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.train",
        description=__doc__.split("\n\n")[0],
        epilog="Run folders are runs/SUITE/NAME; `python -m acp_repro.suite SUITE` lists the names.",
    )
    parser.add_argument("--suite", default="cpu", help="a name in experiments/ (default: cpu)")
    parser.add_argument("--run", action="append", metavar="NAME", help="only this run (repeatable)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    options = parser.parse_args(arguments)
    try:
        suite = load_suite(options.suite)
        runs = [suite.run(name) for name in options.run] if options.run else suite.runs
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    import torch

    from .data import DataError
    from .training.checkpoint import CheckpointError
    from .training.loop import TrainingError, train

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        for run in runs:
            train(run, device=device)
    except (TrainingError, CheckpointError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
