"""Measures trained runs: ``python -m acp_repro.measure QUANTITY... --suite cpu [--run NAME]``.

The command writes results/SUITE/RUN/QUANTITY.csv. Results that match the present weights and settings are
kept, except with ``--force``. Metrics that depend only on a run's shape need no training and are measured
first. Only one process at a time measures in a folder; other processes wait.
"""

import argparse

from .common.command import command, described_parser, run_command
from .pipeline.errors import SuiteError
from .pipeline.paper import Metric, Suite
from .pipeline.paper_registry import find_paper, paper_names
from .pipeline.run import Run
from .pipeline.suite_file import load_suite
from .pipeline.training.measuring import bring_up_to_date


@command("the same command measures what is missing", extra="pipeline")
def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    suite = load_suite(options.suite)
    bring_up_to_date(suite, _wanted(suite, options), options.device, again=options.force)


def _wanted(suite: Suite, options: argparse.Namespace) -> list[tuple[Run, Metric]]:
    """(run, metric) pairs; the pairs of a run are consecutive, so that its weights are loaded once."""
    asked = [suite.paper.metric(name) for name in options.metric]
    for metric in asked:
        if metric.command:
            raise SuiteError(f"{metric.name} has its own command; run {metric.command_for(suite.name)}")
    named = [suite.run(name) for name in options.run or ()]
    pairs = {(run, metric) for metric in asked for run in named or metric.runs(suite)}
    if not pairs:
        names = ", ".join(metric.name for metric in asked)
        raise SuiteError(f"{names}: suite {suite.name} has no run for it; choose a run with --run NAME")
    for metric in asked:
        about = metric.runs(suite)
        for run in named if about else ():
            if not any(type(run) is type(other) for other in about):
                raise SuiteError(f"{metric.name} does not apply to {run.name}; choose another run")
    of_shape = {pair for pair in pairs if pair[1].untrained(pair[0])}
    return [
        (run, metric)
        for chosen in (of_shape, pairs - of_shape)  # first, so that an untrained run does not stop them
        for run in suite.runs
        for metric in suite.paper.metrics
        if (run, metric) in chosen
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    metrics = "\n".join(
        f"  {name}: {' '.join(q.name for q in find_paper(name).metrics if not q.command)}"
        for name in paper_names()
    )
    parser = described_parser("measure", __doc__, epilog=f"metrics, by paper:\n{metrics}")
    add = parser.add_argument
    add("metric", nargs="+", help="metrics to measure, from the list below")
    add("--suite", default="cpu", help="a name in experiments/ or a YAML file (default: cpu)")
    add(
        "--run",
        action="append",
        metavar="NAME",
        help="only this run (repeatable; default: all runs of the metric)",
    )
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add("--force", action="store_true", help="measure again even if up to date")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
