"""Measures trained runs: ``python -m acp_repro.measure QUANTITY... --suite cpu [--run NAME]``.

Writes results/SUITE/RUN/QUANTITY.csv. A record newer than the weights is kept, unless ``--again``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import math
import sys

from ..finished_run import measured_run
from ..records import QUANTITIES, RecordError, path_of, write_records, write_settings
from ..suite import Run, SuiteError, load_suite
from .selection import OPTIONS, select


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m acp_repro.measure", description=__doc__.split("\n\n")[0])
    parser.add_argument("quantity", nargs="+", choices=QUANTITIES, help="what to measure")
    parser.add_argument("--suite", default="cpu", help="a name in experiments/ (default: cpu)")
    parser.add_argument(
        "--run",
        action="append",
        metavar="NAME",
        help="only this run (repeatable; default: all that it is about)",
    )
    parser.add_argument("--device", help="cpu, cuda (default: a GPU if there is one)")
    parser.add_argument("--again", action="store_true", help="measure anew what is up to date")
    parser.add_argument(
        "--heads",
        nargs="+",
        type=_layer_and_head,
        metavar="LAYER.HEAD",
        help="for decay and attention_weights: look at these heads, counted from 0 "
        "(default: by savings, the most local, one halfway, the most global, and "
        "one whose boundary shows in the first blocks)",
    )
    options = parser.parse_args(arguments)
    keywords = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    for quantity, name in itertools.product(options.quantity, keywords):
        if quantity not in OPTIONS[name]:
            parser.error(f"--{name}: {quantity} has no such choice; {', '.join(OPTIONS[name])} have")
    try:
        suite = load_suite(options.suite)
        wanted = select(suite, options.quantity, options.run)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stale = []
    for run, quantity in wanted:
        # A record does not say which options made it, so one that is asked for is always made.
        if options.again or keywords or not _is_current(run, quantity):
            stale.append((run, quantity))
        else:
            print(f"{path_of(run.suite, run.name, quantity)}: up to date")
    if not stale:
        return 0

    import torch

    from ..data import DataError
    from ..training.loop import TrainingError
    from .trained import TrainedRun

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # The longest context length, where the shorter ones divide it.
    common_length = math.lcm(*(run.context_length for run in suite.runs))
    try:
        for run, group in itertools.groupby(stale, key=lambda pair: pair[0]):
            trained = TrainedRun.load(run, suite.measure, device, common_length)
            group = [quantity for _, quantity in group]
            for quantity in group:
                measure = importlib.import_module(f".{quantity}", __package__).measure
                path = write_records(
                    run,
                    quantity,
                    measure(trained, **keywords),
                    device=trained.device_name,
                    dtype=run.training.dtype,
                    trained_tokens=trained.trained_tokens,
                    uses_gpu=device.type == "cuda",
                )
                print(path)
            took = measured_run(run)
            write_settings(run, suite.measure, group, took and dataclasses.asdict(took))
    except (TrainingError, RecordError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _layer_and_head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYER.HEAD, such as 0.3")
    return int(layer), int(head)


def _is_current(run: Run, quantity: str) -> bool:
    weights = run.model_folder / "model.safetensors"
    record = path_of(run.suite, run.name, quantity)
    return record.exists() and weights.exists() and record.stat().st_mtime >= weights.stat().st_mtime


if __name__ == "__main__":
    sys.exit(main())
