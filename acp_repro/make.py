"""Makes figures with all required results: ``python -m acp_repro.make figure2 --suite cpu``.

The command trains, measures and draws what is missing, and prints the command of each step. A goal is the
name of a figure or table, or one of records, figures, tables, report, all, reproduction, help (lists figures
and tables) and clean (deletes the suite's runs, results and figures). The Makefile calls this command.
"""

import argparse
import shutil

from .common.command import STOPPED, command, described_parser, positive, run_command, run_words
from .pipeline import freshness, planner
from .pipeline.errors import SuiteError
from .pipeline.paper import FIGURES, RESULTS, FigureSpec, Suite
from .pipeline.run import RUNS
from .pipeline.suite_file import load_suite, suite_names


@command("the same command continues where it was", extra="figures")
def main(arguments: list[str] | None = None) -> int | None:
    options = _parse(arguments)
    goals = " ".join(options.goals).split()  # Make passes all goals as one word
    if goals == ["help"]:
        return _help(options.suite)
    suite = load_suite(options.suite)
    if goals == ["clean"]:
        return _clean(suite, options)
    wanted = planner.targets(suite, goals)
    train = "".join(f" --{n} {getattr(options, n)}" for n in ("nproc", "jobs") if getattr(options, n))
    if options.dry_run:
        for stage in planner.stages(suite, planner.missing(suite, wanted), train):
            print("\n".join(words for words, _ in stage))
        return None
    with freshness.exclusive(f"make-{suite.name}", f"makes something of suite {suite.name}"):
        stale = planner.missing(suite, wanted)
        for stage in planner.stages(suite, stale, train):
            code = 0
            for words, item in stage:  # a failing measurement does not stop the others
                print(words, flush=True)
                if item is None:
                    code = max(code, run_words(words))
                else:  # drawn in this process, which has imported the modules of all items
                    from analysis import drawing

                    drawing.draw(str(suite.path), item.name)
                if code == STOPPED:
                    break
            if code:
                return code
    for target in dict.fromkeys(target for target in wanted if not isinstance(target, tuple)):
        if isinstance(target, FigureSpec) and target.is_table and target.name in goals:
            print(target.path(suite.name).read_text(encoding="utf-8"))
    return None


def _help(suite_name: str) -> None:
    """Lists the figures and tables of the suite with their titles; without the drawing libraries, prints one
    line."""
    print(
        f"  SUITE={suite_name} is the suite at hand; SUITE=file.yaml is your own, and SUITE=name one of "
        f"experiments/: {', '.join(suite_names())}"
    )
    print("Figures and tables, each made with all that it needs:")
    try:
        suite = load_suite(suite_name)
        able = [(item.name, item.title) for item in suite.paper.items if item.runs(suite)]
        able += [(planner.HEADS, planner.HEADS_TITLE)] if suite.run_for_heads else []
        print(
            f"  of {suite.paper.title}:", *(f"    make {name:<15} {title}" for name, title in able), sep="\n"
        )
    except ImportError:
        print("  make figure2 is one; make setup installs what lists them all")


def _clean(suite: Suite, options: argparse.Namespace) -> None:
    if suite.file.published and not options.force:
        raise SuiteError(
            f"{RESULTS / suite.name} is part of the project; delete it with make clean SUITE={suite.option} "
            "FORCE=1"
        )
    folders = [top / suite.name for top in (RUNS, RESULTS, FIGURES, freshness.MAKE)]
    print("rm -rf", *folders)
    for folder in () if options.dry_run else folders:
        shutil.rmtree(folder, ignore_errors=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("make", __doc__)
    add = parser.add_argument
    add("goals", nargs="+", metavar="GOAL", help="what to make, such as figure2")
    add("--suite", default="cpu", help="a name in experiments/ or a YAML file (default: cpu)")
    add("--dry-run", action="store_true", help="print the commands and run none")
    add("--nproc", type=positive, metavar="N", help="GPUs per training run")
    add("--jobs", type=positive, metavar="N", help="concurrent training runs")
    add("--force", action="store_true", help="clean: also delete files that ship with the project")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
