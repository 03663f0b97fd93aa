"""What Make needs to know of a suite: ``python -m acp_repro.make_rules SUITE FOLDER``.

Prints variables that name the runs behind each figure, and keeps a stamp for the settings of each run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from .records import settings_path, settings_text
from .suite import Run, Suite, SuiteError, first_seeds, load_suite

_LONG_AGO = 86_400.0  # a day after the epoch: Make takes the epoch itself for "does not exist"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m acp_repro.make_rules", description=__doc__)
    parser.add_argument("suite", help="a name in experiments/")
    parser.add_argument("folder", type=Path, help="where the stamps are kept")
    arguments = parser.parse_args()
    try:
        suite = load_suite(arguments.suite)
    except SuiteError as error:
        raise SystemExit(f"error: {error}") from None
    write_stamps(suite, arguments.folder)
    print(make_rules(suite))


def write_stamps(suite: Suite, folder: Path) -> None:
    """``FOLDER/RUN.json`` for each run and ``FOLDER/measure.json``: the settings that Make watches.

    A stamp changes only when its own settings do, so adding a run to the grid, or a comment, does
    nothing again. A stamp that is made for the first time is older than any file, so records that came
    with a checkout, in whatever order, stay up to date; unless ``results/SUITE/RUN/settings.json``
    says that they are of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measure = json.dumps(dataclasses.asdict(suite.measure), indent=2) + "\n"
    all_current = True
    for run in suite.runs:
        recorded = _recorded_settings(run)
        now = json.loads(settings_text(run, suite.measure))
        current = {
            key: recorded is None or (recorded[key] == now[key] and not recorded.get("older", {}).get(key))
            for key in ("run", "measure")
        }
        _stamp(folder, run.name, json.dumps(now["run"], indent=2) + "\n", current["run"])
        all_current &= current["measure"]
    _stamp(folder, "measure", measure, all_current)


def _stamp(folder: Path, name: str, text: str, records_are_current: bool) -> None:
    path = folder / f"{name}.json"
    new = not path.exists()
    if new or path.read_text() != text:
        path.write_text(text)
    if new and records_are_current:
        os.utime(path, (_LONG_AGO, _LONG_AGO))


def _recorded_settings(run: Run) -> dict[str, Any] | None:
    """The settings that the records of a run were made with, where that is known."""
    try:
        return json.loads(settings_path(run).read_text())
    except FileNotFoundError:
        return None


def make_rules(suite: Suite) -> str:
    """Variables that name the runs behind each figure, for the Makefile to include."""
    pro, llama = (suite.with_all_seeds(suite.twins(name)) for name in ("pro", "llama"))
    largest = max((run.size.non_embedding for run in pro), default=0)
    names = {
        "RUNS_ACP_PRO": first_seeds(suite.select(architecture="pro", acp=True)),
        "RUNS_ACP_LLAMA": first_seeds(suite.select(architecture="llama", acp=True)),
        "TWINS_PRO_LARGEST": [run for run in pro if run.size.non_embedding == largest],
        "TWINS_PRO_OTHER": [run for run in pro if run.size.non_embedding != largest],
        "TWINS_LLAMA": llama,
        "HEADS_RUN": [suite.heads_run],
        "SWEEP_RUN": [suite.sweep_run],
    }
    lines = [f"{k} := {' '.join(run.name for run in runs)}" for k, runs in names.items()]
    if suite.weights is not None:
        lines.append(f"READY := {suite.weights.folder}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
