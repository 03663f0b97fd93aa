"""Lists the runs of a suite, one a line: ``python -m acp_repro.suite NAME``.

With ``--new mine.yaml --text FOLDER`` it writes a suite for your own text, with comments, sized for this
machine. ``--keys`` prints every key of a suite file with its default, as ``docs/suite-keys.md`` has them.
"""

from __future__ import annotations

from pathlib import Path

from .common.command import Parser, command, described_parser, existing, imports_of, output_file, run_command
from .common.errors import UsageError
from .pipeline.registry import find_paper, paper_names
from .pipeline.run import option_of
from .pipeline.strict_yaml import key_table
from .pipeline.suite import load_suite

with imports_of("chain"):
    from .pipeline.papers.acp.new_suite import write_suite

KEYS = """# Keys of a suite file

`python -m acp_repro.suite --keys` writes this page from the dataclasses that validate a suite. `NAME` in a
key is a name that you choose, and `[]` stands for each entry of a list. The defaults are those of the papers.
"""


@command(extra="chain")
def main(arguments: list[str] | None = None) -> None:
    parser = described_parser("suite", __doc__)
    add = parser.add_argument
    add("suite", nargs="?", default="cpu", help="a name in experiments/ or a YAML file")
    add("--names", action="store_true", help="print only the names of the runs")
    add("--new", metavar="FILE.yaml", type=output_file, help="write a suite for --text")
    add("--text", metavar="PATH", type=existing, help="the file or folder of text to train on")
    add("--keys", action="store_true", help="print every key with its default, in Markdown")
    options = parser.parse_args(arguments)
    if options.keys:
        tables = (f"\n## {name}\n\n{key_table(find_paper(name).file)}" for name in paper_names())
        print(KEYS, *tables, sep="", end="")
    elif options.new or options.text:
        _write(parser, options.new, options.text)
    else:
        suite = load_suite(options.suite)
        if not options.names:
            print(f"{suite.name}: {suite.description}")
        print("\n".join(("" if options.names else "  ") + run.name for run in suite.runs))


def _write(parser: Parser, path: Path | None, text: str | None) -> None:
    if not (path and text and path.suffix in (".yaml", ".yml")):
        parser.error("give both --new FILE.yaml and --text PATH")
    if path.exists():
        raise UsageError(f"--new {path}: exists; name another file, or delete this one")
    takes = write_suite(path, text)
    suite = load_suite(str(path))
    print(f"{path}: {len(suite.runs)} runs; `make figure2 SUITE={option_of(suite.name)}` takes {takes}")


if __name__ == "__main__":
    run_command(main)
