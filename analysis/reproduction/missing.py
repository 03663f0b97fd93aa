"""What is still missing: the one list, at the end of REPRODUCTION.md.

Most of it is read from the suites and from the claims without records.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from acp_repro.pipeline import plan
from acp_repro.pipeline.paper import Suite

from ..ledger import Row


class Gap(NamedTuple):
    """Something that nobody has measured, and what would close it."""

    what: str
    how: str


WRITTEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ANSWERED = [line for paper in WRITTEN.values() for line in paper["answered"]]


def gaps(name: str, rows: Sequence[Row], suites: Sequence[Suite]) -> tuple[Gap, ...]:
    """All that is missing of one paper: whole suites, runs of a suite, claims, and what is written down."""
    unmeasured = {row.where: row for row in rows if row.missing and row.where}
    return (
        *(_of_suite(suite) for suite in suites if suite.file.published is False),
        *(_of_runs(suite) for suite in suites if suite.not_run),
        *(Gap(f"{where}: {row.claim}", row.numbers) for where, row in unmeasured.items()),
        *(Gap(*gap) for gap in WRITTEN.get(name, {}).get("missing", ())),
    )


def _of_suite(suite: Suite) -> Gap:
    drawn = any(plan.is_usual(suite, i) and i.runs(suite) for i in suite.paper.items)
    how = f"`make all SUITE={suite.name}`" if drawn else f"the commands in [its file]({suite.path})"
    return Gap(f"suite `{suite.name}`, {len(suite.runs)} runs: {suite.description}", how)


def _of_runs(suite: Suite) -> Gap:
    how = f"take them out of `not_run`; `make all SUITE={suite.name}`"
    count, alike = len(suite.not_run), {}
    for run in suite.not_run:
        alike.setdefault(run.name.removesuffix(f"-seed{run.seed}"), []).append(run)
    names = (
        f"{name} (seeds {', '.join(str(run.seed) for run in runs)})" if len(runs) > 1 else runs[0].name
        for name, runs in alike.items()
    )
    words = f"{count} run{'s' * (count > 1)} of suite `{suite.name}` (`not_run` in [its file]({suite.path}))"
    return Gap(f"{words}: {', '.join(names)}", how)
