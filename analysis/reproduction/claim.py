"""Measures one claim again: ``make claim ID=acp.figure2.1``.

Trains what lacks weights, measures, and prints the old and the new number and verdict. The records in
``results/`` are then the new ones. Without an ID it lists all claims and what each costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from acp_repro.common.command import choose_device, command, plain, run_command, run_words
from acp_repro.pipeline import plan
from acp_repro.pipeline.errors import SuiteError, UnknownName
from acp_repro.pipeline.paper import Suite
from acp_repro.pipeline.registry import find_paper, paper_names
from acp_repro.pipeline.suite import load_suite

from ..report.gather import all_records
from .again import Again, by_records
from .gather import Line, gather, numbered, of_suite


@command("the same command goes on from where it was")
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.reproduction.claim", description=plain(__doc__))
    parser.add_argument("id", nargs="?", help="of a line of REPRODUCTION.md, such as acp.figure2.1")
    parser.add_argument(
        "--suite", help="measure it on the runs of this suite (default: those that REPRODUCTION.md quotes)"
    )
    options = parser.parse_args(arguments)
    if options.suite is not None:
        load_suite(options.suite)  # a wrong name is told before all records are read
    if options.id is None:
        for line in _lines():
            cost = line.again.cost if line.again else "nothing measures it"
            print(f"{line.id:22} {line.claim.claim}: {cost}")
        return 0
    known = [id for name in paper_names() for id, *_ in numbered(find_paper(name))]
    if options.id not in known:
        raise UnknownName.among(f"no claim has the ID {options.id!r}", options.id, known)
    if (line := next(_lines(options.id), None)) is None:
        raise SuiteError(f"{options.id}: no suite of its paper in experiments/ says `published: true`")
    return _again(line, options.suite)


def _lines(id: str | None = None) -> Iterator[Line]:
    return (line for section in gather(id) for line in section.lines)


def _again(line: Line, suite_name: str | None) -> int:
    print(f"{line.id}: {line.claim.claim}\n  holds if: {line.claim.holds_if or '-'}")
    print(f"old: {line.word}: {line.ours}" + (f" ({line.scale})" if line.scale else ""))
    suite = _suite(line, suite_name)
    again = line.again if suite is None else _on(line, suite)
    if again is None:
        raise SuiteError(f"{line.id}: nothing measures it: {line.ours}")
    print(f"cost: {again.cost}")
    on_gpu = any(device.startswith("NVIDIA") for device in again.devices)
    if on_gpu and suite_name is None and choose_device(None).type == "cpu":
        raise SuiteError(f"{line.id}: no GPU is here to train that; name a suite for CPUs, such as SUITE=cpu")
    for words in again.commands:
        print(f"$ {words}", flush=True)
        if code := run_words(words):
            return code
    if suite is None:
        print(f"new: {line.word}: the test passes")
        return 0
    if pooled := line.claim.pooled and again is line.again:
        found = next(_lines(line.id))
    else:
        records = all_records(suite, line.claim.quantities)
        judged_on = suite.paper.item(_item_name(line))
        found = of_suite(line.id, line.claim, line.item, judged_on, suite, records)
    print(f"new: {found.word}: {found.ours} ({found.scale})")
    folder = "results" if pooled else f"results/{suite.name}"
    print(f"the new records lie in {folder}/; `git diff {folder}` shows what changed")
    return 0


def _suite(line: Line, name: str | None) -> Suite | None:
    """On whose runs it is measured; None for a test.

    Raises:
        SuiteError: no suite has records of it and none is named, or the named one cannot have it.
    """
    if not line.claim.quantities:
        return None
    name = name or (line.again.suite if line.again else None)
    if name is None:
        raise SuiteError(f"{line.id}: {line.ours}; or name a suite to measure it on: SUITE=name")
    suite = load_suite(name)
    item = suite.paper.item(_item_name(line))
    if suite.paper.name != line.id.partition(".")[0] or not item.runs(suite):
        raise SuiteError(f"suite {suite.name} cannot show {line.id}: {plan.why_not(suite, item)}")
    return suite


def _item_name(line: Line) -> str:
    return line.item.name if line.item else line.claim.item


def _on(line: Line, suite: Suite) -> Again:
    """The commands for one suite: on the runs that have records, or else on all that the item is about."""
    if line.again and line.again.suite == suite.name:
        return line.again
    item = suite.paper.item(_item_name(line))
    return by_records(line.claim, item, suite, item.runs(suite))


if __name__ == "__main__":
    run_command(main)
