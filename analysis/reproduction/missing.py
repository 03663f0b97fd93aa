"""The list of missing measurements at the end of REPRODUCTION.md."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from acp_repro.pipeline import planner
from acp_repro.pipeline.paper import Suite

from ..ledger import Row

WRITTEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def gaps(name: str, rows: Sequence[Row], suites: Sequence[Suite]) -> tuple[tuple[str, str], ...]:
    """(missing measurement, remedy) of one paper: whole suites, runs of a suite, claims, and the entries of
    ``missing.toml``."""
    unmeasured = {row.where: row for row in rows if row.missing and row.where}
    return (
        *(_of_suite(suite) for suite in suites if suite.file.published is False),
        *(_of_runs(suite) for suite in suites if suite.skip_runs),
        *((f"{where}: {row.claim}", row.numbers) for where, row in unmeasured.items()),
        *WRITTEN.get(name, ()),
    )


def _of_suite(suite: Suite) -> tuple[str, str]:
    drawn = any(planner.is_usual(suite, i) and i.runs(suite) for i in suite.paper.items)
    how = f"`make all SUITE={suite.name}`" if drawn else f"the commands in [its file]({suite.path})"
    return f"suite `{suite.name}`, {len(suite.runs)} runs", how


def _of_runs(suite: Suite) -> tuple[str, str]:
    runs = f"{len(suite.skip_runs)} run{'s' * (len(suite.skip_runs) > 1)} of suite `{suite.name}`"
    return runs, f"[its file]({suite.path}) without `skip_runs`"
