"""Compares two models on downstream tasks, item by item: ``python -m acp_repro.compare A B``.

A and B are evaluations of the LM Evaluation Harness. Each is one of the following: folders or files with
samples_*.jsonl, which lm-eval writes with --log_samples --output_path in any project; results of `python -m
acp_repro.evaluate` (runs/evaluations/NAME); or the results of a run (results/SUITE/RUN). The command pairs
the items that both evaluations contain. The harness itself is not needed.
"""

import argparse
from pathlib import Path

from .common import files
from .common.bounds import Positive
from .common.command import aligned, bounded, command, described_parser, output_file, run_command

MARGIN = 0.01
_LEGEND = """\
A - B of perplexities is a difference of logarithms, negative if A is better. p: McNemar's exact test for
right-or-wrong scores, otherwise a permutation test with random signs. within: two one-sided tests that
|A - B| is under {margin:g}. Both p-values include Holm's correction over all rows. Items show whether two
models differ; two seeds of one method may differ as well. A comparison of methods needs several training
runs of each."""


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    from .pipeline.evaluation import comparison

    names = (str(options.a), str(options.b))
    a, b = comparison.read(options.a), comparison.read(options.b)
    keys = comparison.choose(a, b, names, options.tasks, options.metrics)
    rows, notes = comparison.compare(a, b, names, keys, options.margin)
    print(f"A: {names[0]}\nB: {names[1]}")
    for note in notes:
        print(f"note: {note}")
    _print_table(rows)
    print(_LEGEND.format(margin=options.margin))
    if options.csv:
        cells = ([row[name] for name in comparison.COLUMNS] for row in rows)
        print(f"table: {files.write_csv(options.csv, comparison.COLUMNS, cells).resolve()}")


def _print_table(rows: list[dict]) -> None:
    table = [("task", "metric", "items", "A", "B", "A - B", "95 % interval", "p", "within", "verdict")]
    for row in rows:
        numbers = [f"{row[name]:.4f}" for name in ("a", "b")]
        interval = f"[{row['low']:+.4f}, {row['high']:+.4f}]"
        p_values = [f"{row[f'adjusted_{name}']:.2g}" for name in ("p_value", "equivalence_p_value")]
        first = (row["task"], row["metric"], f"{row['items']:,}", *numbers, f"{row['difference']:+.4f}")
        table.append((*first, interval, *p_values, row["verdict"]))
    print("\n".join(aligned(table, left=(0, 1, len(table[0]) - 1))))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("compare", __doc__)
    add = parser.add_argument
    add("a", metavar="A", type=Path, help="a folder or file of an evaluation")
    add("b", metavar="B", type=Path, help="another one")
    add("--tasks", type=_names, default=[], metavar="NAME,...", help="default: all that both have")
    add("--metrics", type=_names, default=[], metavar="NAME,...", help="default: all that both have")
    add(
        "--margin",
        type=bounded(Positive),
        default=MARGIN,
        metavar="X",
        help="the smallest difference that matters, in the metric's units; for perplexities in logarithms "
        "(default: %(default)s)",
    )
    add("--csv", type=output_file, metavar="FILE", help="also write the table to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
