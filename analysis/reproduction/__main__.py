"""Judges every claim on the published records; writes claims.json and the pages rendered from it."""

from pathlib import Path

from acp_repro.common import files
from acp_repro.common.command import Parser, command, imports_of, run_command
from acp_repro.pipeline.suite_file import load_suite, suite_names

with imports_of("figures"):
    from .. import ledger
    from ..drawing import forest, save
    from . import page

PATH, README = Path("REPRODUCTION.md"), Path("README.md")


@command()
def main(arguments: list[str] | None = None) -> None:
    Parser(prog="python -m analysis.reproduction", description=__doc__).parse_args(arguments)
    rows = ledger.judge_all()
    ledger.run_tests(rows)
    ledger.write(rows)
    rows = ledger.read()
    write_pages(rows, ledger.read_models())
    for row in filter(page.is_plotted, rows.values()):
        save(
            forest(row.values, row.axis, row.paper_range),
            page.CLAIMS / "plots" / f"{row.id}.png",
            "",
            ["png"],
        )


def write_pages(rows: dict[str, ledger.Row], models: list[dict]) -> None:
    """REPRODUCTION.md, docs/claims/, docs/trained-models.md and the README's tables from the rows."""
    suites = [load_suite(name) for name in suite_names()]
    named = {id.partition(".")[0] for id in rows}
    papers = list({suite.paper.name: suite.paper for suite in suites if suite.paper.name in named}.values())
    for paper in papers:
        own = [row for row in rows.values() if row.id.startswith(f"{paper.name}.")]
        files.write_text(page.CLAIMS / f"{paper.name}.md", page.claims_page(paper, own))
    if README.is_file():
        files.write_text(README, page.readme(README.read_text(encoding="utf-8"), rows))
    files.write_text(page.CLAIMS.parent / "trained-models.md", page.trained_models(models))
    written = files.write_text(PATH, page.reproduction(list(rows.values()), papers, suites))
    print(f"page: {written.resolve()}")


if __name__ == "__main__":
    run_command(main)
