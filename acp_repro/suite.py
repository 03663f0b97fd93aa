"""Lists the runs of a suite, one a line: ``python -m acp_repro.suite NAME``."""

from __future__ import annotations

from .common.command import command, described_parser, run_command
from .pipeline.suite import load_suite


@command()
def main(arguments: list[str] | None = None) -> None:
    parser = described_parser("suite", __doc__)
    parser.add_argument("suite", nargs="?", default="cpu", help="a name in experiments/ or a YAML file")
    parser.add_argument("--names", action="store_true", help="print only the names of the runs")
    options = parser.parse_args(arguments)
    suite = load_suite(options.suite)
    if options.names:
        print("\n".join(run.name for run in suite.runs))
        return
    print(f"{suite.name}: {suite.description}")
    for run in suite.runs:
        print(f"  {run.name}")


if __name__ == "__main__":
    run_command(main)
