"""What Make needs to know of a suite: ``python -m acp_repro.make_rules SUITE FOLDER``.

Prints variables that name the runs behind each figure, and keeps a stamp for the settings of each run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

from .suite import Suite, SuiteError, load_suite, suite_path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m acp_repro.make_rules", description=__doc__)
    parser.add_argument("suite", help="a name in experiments/")
    parser.add_argument("folder", type=Path, help="where the stamps are kept")
    arguments = parser.parse_args()
    try:
        suite = load_suite(arguments.suite)
    except SuiteError as error:
        raise SystemExit(f"error: {error}") from None
    write_stamps(suite, arguments.folder, suite_path(arguments.suite).stat().st_mtime)
    print(make_rules(suite))


def write_stamps(suite: Suite, folder: Path, since: float) -> None:
    """``FOLDER/RUN.json`` for each run and ``FOLDER/measure.json``: the settings that Make watches.

    A stamp changes only when its own settings do, so adding a run to the grid, or a comment, does
    nothing again. A new stamp is as old as the suite's file: records that came with a checkout, without
    their runs, stay up to date.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamps = {run.name: run.as_dict() for run in suite.runs}
    for name, settings in {**stamps, "measure": dataclasses.asdict(suite.measure)}.items():
        path = folder / f"{name}.json"
        text = json.dumps(settings, indent=2, default=dict) + "\n"
        if not path.exists():
            path.write_text(text)
            os.utime(path, (since, since))
        elif path.read_text() != text:
            path.write_text(text)


def make_rules(suite: Suite) -> str:
    """Variables that name the runs behind each figure, for the Makefile to include."""
    pro, llama = suite.twins("pro"), suite.twins("llama")
    largest = max((run.size.non_embedding for run in pro), default=0)
    names = {
        "RUNS_ACP_PRO": suite.select(architecture="pro", acp=True),
        "RUNS_ACP_LLAMA": suite.select(architecture="llama", acp=True),
        "TWINS_PRO_LARGEST": [run for run in pro if run.size.non_embedding == largest],
        "TWINS_PRO_OTHER": [run for run in pro if run.size.non_embedding != largest],
        "TWINS_LLAMA": llama,
        "HEADS_RUN": [suite.heads_run],
        "SWEEP_RUN": [suite.sweep_run],
    }
    return "\n".join(f"{k} := {' '.join(run.name for run in runs)}" for k, runs in names.items())


if __name__ == "__main__":
    main()
