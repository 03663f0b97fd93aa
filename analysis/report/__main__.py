"""One page with every figure and table of a suite, and its paper's claims checked against its records."""

from __future__ import annotations

import argparse

from acp_repro.chain.paper import FIGURES
from acp_repro.common import files
from acp_repro.common.command import command, run_command

from .gather import gather
from .page import render


@command()
def main(arguments: list[str] | None = None) -> None:
    """Writes ``figures/SUITE/report.html``: one file without a reference to the network.

    What is not measured or not drawn is listed with the command that makes it. Only the links to records
    need the folders beside the page.
    """
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=__doc__)
    parser.add_argument("--suite", default="cpu", help="whose records to show (default: cpu)")
    report = gather(parser.parse_args(arguments).suite)
    path = files.write_text(FIGURES / report.suite.name / "report.html", render(report))
    print(f"report: {path.resolve()}")


if __name__ == "__main__":
    run_command(main)
