"""Measures one claim again: ``make claim ID=acp.figure2.1``.

Trains runs without weights, measures, and prints the old and the new answer and verdict. The new records
replace those in ``results/``. Without an ID the command lists all claims with their cost.
"""

from acp_repro.common.command import Parser, choose_device, command, imports_of, plain, run_command, run_words
from acp_repro.pipeline import planner
from acp_repro.pipeline.errors import SuiteError, find_named
from acp_repro.pipeline.paper_registry import find_paper
from acp_repro.pipeline.suite_file import load_suite

with imports_of("figures"):
    from .. import ledger
    from ..rerun import rerun
    from . import reference


@command("the same command resumes")
def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m analysis.reproduction.claim", description=plain(__doc__))
    parser.add_argument("id", nargs="?", help="a claim of REPRODUCTION.md, such as acp.figure2.1")
    parser.add_argument(
        "--suite", help="measure the claim on this suite (default: the deciding suite in REPRODUCTION.md)"
    )
    options = parser.parse_args(arguments)
    if not (rows := ledger.read()):
        raise SuiteError("claims.json is missing; `make reproduction` writes it")
    if options.id is None:
        for row in rows.values():
            print(f"{row.id:22} {row.claim}: {row.cost}")
        return 0
    row = find_named(rows, options.id, f"no claim has the ID {options.id!r}")
    return _again(row, options.suite)


def _again(row: ledger.Row, suite_name: str | None) -> int:
    print(f"{row.id}: {row.claim}\n  holds if: {row.criterion or '-'}")
    paper = find_paper(row.id.partition(".")[0])
    claim, item = next((claim, item) for id, claim, item in ledger.numbered(paper) if id == row.id)
    commands, cost, devices = row.commands, row.cost, row.devices
    suite = load_suite(suite_name) if suite_name and claim.metrics else None
    old, before = row, {}
    if suite:
        judged_on = item or paper.item(claim.items[0])
        if suite.paper is not paper or not judged_on.runs(suite):
            raise SuiteError(f"suite {suite.name} cannot show {row.id}: {planner.why_not(suite, judged_on)}")
        metrics = paper.required(claim.metrics)
        again = rerun([(metrics, judged_on, suite, judged_on.runs(suite))])
        commands, cost, devices = again["commands"], again["cost"], ()
        before = reference.read(suite, claim.metrics)
        records = {suite.name: before or ledger.all_records(suite, claim.metrics)}
        old = ledger.judge_row(row.id, claim, item, paper, [suite], records)
        if suite.name != row.suite:
            print(
                f"  suite {suite.name} ({suite.file.description}) cannot change the verdict, which is "
                f"{row.verdict!s} on suite {row.suite or '(none)'}; its new results are compared with its "
                "earlier ones"
            )
    scale = f" ({old.scale})" if old.scale else ""
    print(f"{'reference' if before else 'old'}: {old.verdict}: {old.numbers}{scale}")
    if not commands:
        name = "" if not claim.metrics else "; or name a suite to measure it on: SUITE=name"
        raise SuiteError(f"{row.id}: nothing measures it: {row.numbers}{name}")
    print(f"cost: {cost}")
    if any(device.startswith("NVIDIA") for device in devices) and choose_device(None).type == "cpu":
        raise SuiteError(f"{row.id}: training needs a GPU; name a suite for CPUs, such as SUITE=cpu")
    for words in commands:
        print(f"$ {words}", flush=True)
        if code := run_words(words):
            return code
    if row.test and not row.records:
        print(f"new: {row.verdict}: the test passes")
        return 0
    if suite:
        fresh = ledger.all_records(suite, claim.metrics)
        new = ledger.judge_row(row.id, claim, item, paper, [suite], {suite.name: fresh})
    else:
        (new,) = ledger.judge_all(row.id)
    print(f"new: {new.verdict}: {new.numbers} ({new.scale})")
    if suite and before:
        print(*reference.compare(suite, fresh, before), sep="\n  ")
    folder = f"results/{suite.name if suite else row.suite}"
    print(f"the new records are in {folder}/; `git diff {folder}` shows what changed in committed ones")
    return 0


if __name__ == "__main__":
    run_command(main)
