"""Every figure and table of a suite, and its paper's claims checked against its records, on one page."""

from acp_repro.common import files
from acp_repro.common.command import Parser, command, imports_of, run_command
from acp_repro.pipeline.paper import FIGURES

with imports_of("figures"):
    from .gather import gather
    from .page import render


@command()
def main(arguments: list[str] | None = None) -> None:
    """Writes ``figures/SUITE/report.md``."""
    parser = Parser(prog="python -m analysis.report", description=__doc__)
    parser.add_argument("--suite", default="cpu", help="the suite whose records are shown (default: cpu)")
    report = gather(parser.parse_args(arguments).suite)
    path = files.write_text(FIGURES / report.suite.name / "report.md", render(report))
    print(f"report: {path.resolve()}")


if __name__ == "__main__":
    run_command(main)
