"""Lists the runs of a suite, one per line: ``python -m acp_repro.suite NAME``.

``--new mine.yaml --text FOLDER`` writes a commented suite for your own text, sized for this machine.
``--keys`` prints every key of a suite file with its meaning and default, as in ``docs/suite-keys.md``.
"""

from pathlib import Path

from .common.command import command, described_parser, existing, imports_of, output_file, run_command
from .common.errors import UsageError
from .pipeline.paper_registry import find_paper, paper_names
from .pipeline.run import option_of
from .pipeline.strict_yaml import key_table
from .pipeline.suite_file import load_suite

with imports_of("pipeline"):
    from .papers.acp.new_suite import write_suite


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> None:
    parser = described_parser("suite", __doc__)
    add = parser.add_argument
    add("suite", nargs="?", default="cpu", help="a name in experiments/ or a YAML file")
    add("--names", action="store_true", help="print only the names of the runs")
    add("--new", metavar="FILE.yaml", type=output_file, help="write a suite for --text")
    add("--text", metavar="PATH", type=existing, help="the file or folder of text to train on")
    add("--keys", action="store_true", help="print every key with its meaning and default, in Markdown")
    options = parser.parse_args(arguments)
    if options.keys:
        tables = (f"## {name}\n\n{key_table(find_paper(name).file)}" for name in paper_names())
        print("\n".join(tables), end="")
    elif options.new or options.text:
        _write(options.new, options.text)
    else:
        suite = load_suite(options.suite)
        head, indent = ([], "") if options.names else ([f"{suite.name}: {suite.description}"], "  ")
        print("\n".join([*head, *(indent + run.name for run in suite.runs)]))


def _write(path: Path | None, text: str | None) -> None:
    if not (path and text and path.suffix in (".yaml", ".yml")) or path.exists():
        raise UsageError("give --new FILE.yaml, a file that does not exist yet, and --text PATH")
    takes = write_suite(path, text)
    suite = load_suite(str(path))
    print(f"{path}: {len(suite.runs)} runs; `make figure2 SUITE={option_of(suite.name)}` takes {takes}")


if __name__ == "__main__":
    run_command(main)
