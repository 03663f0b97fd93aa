"""Draws a figure or table of a suite from its records: ``python -m analysis figure2 --suite cpu``."""

from acp_repro.common.command import Parser, command, imports_of, plain, run_command

with imports_of("figures"):
    from .drawing import draw


@command()
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m analysis", description=plain(__doc__))
    parser.add_argument("item", help="figure2, table4, ...; `make help` lists all")
    parser.add_argument("--suite", default="cpu", help="the suite whose records are drawn (default: cpu)")
    options = parser.parse_args(arguments)
    path = draw(options.suite, options.item)
    if path.suffix == ".md":
        print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main)
