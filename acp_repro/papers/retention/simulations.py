"""Tests the appendices' claims on problems that are small enough for an exact solution:
``python -m acp_repro.papers.retention.simulations --suite SUITE``.

The command writes ``results/SUITE/benchmark/estimator.csv``, ``variance.csv`` and ``complexity.csv``.
"""

from __future__ import annotations

from acp_repro.common.command import command, described_parser, run_command
from acp_repro.pipeline.provenance import processor_name
from acp_repro.pipeline.records import write_suite_records
from acp_repro.pipeline.suite_file import load_suite

METRICS = ("estimator", "variance", "complexity")


@command()
def main(arguments: list[str] | None = None) -> None:
    parser = described_parser("papers.retention.simulations", __doc__)
    parser.add_argument(
        "--suite", default="retention", help="a name in experiments/ or a YAML file (default: retention)"
    )
    suite = load_suite(parser.parse_args(arguments).suite)
    about = {"device": processor_name(), "dtype": "float64"}
    for metric in map(suite.paper.metric, METRICS):
        print(write_suite_records(suite.name, suite.paper, metric, metric.measure()(), **about))


if __name__ == "__main__":
    run_command(main)
