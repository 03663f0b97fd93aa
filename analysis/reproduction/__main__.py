"""REPRODUCTION.md: every claim of every paper in a line, judged on the published records."""

from __future__ import annotations

import argparse
from pathlib import Path

from acp_repro.common import files
from acp_repro.common.command import command, run_command

from .gather import gather
from .page import render

PATH = Path("REPRODUCTION.md")


@command()
def main(arguments: list[str] | None = None) -> None:
    """Writes ``REPRODUCTION.md`` from the records of the suites that say ``published: true``."""
    argparse.ArgumentParser(prog="python -m analysis.reproduction", description=__doc__).parse_args(arguments)
    print(f"page: {files.write_text(PATH, render(gather())).resolve()}")


if __name__ == "__main__":
    run_command(main)
