"""The commands that train and measure a claim's records again, and their cost."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from acp_repro.common import files
from acp_repro.pipeline import freshness, planner
from acp_repro.pipeline.paper import FigureSpec, Suite
from acp_repro.pipeline.run import Run

REFERENCE = Path("reference/results")  # results of the small suites, which the planner does not read
Part = tuple[Iterable[str], FigureSpec, Suite, Sequence[Run]]  # metrics of an item's runs in a suite


def rerun(parts: Iterable[Part]) -> dict[str, Any]:
    """The fields ``commands``, ``cost`` and ``devices`` of a ledger row, for the metrics of all parts."""
    commands: dict[str, None] = {}
    training: list[float | None] = []  # GPU seconds of each run; None if not recorded
    measuring: list[float | None] = []  # seconds of each record
    devices: set[str] = set()
    for names, item, suite, runs in parts:
        metrics = [suite.paper.metric(name) for name in names]
        of_suite = [metric for metric in metrics if metric.command]
        of_runs = [metric for metric in metrics if not metric.command]
        pairs = [(run, metric) for metric in of_runs for run in item.runs_with(suite, metric) if run in runs]
        commands |= dict.fromkeys(metric.command_for(suite.name) for metric in of_suite)
        measuring += [None] * len(of_suite)
        trained = set() if suite.weights else {run for run, metric in pairs if not metric.untrained(run)}
        while first := {needed for run in trained for needed in suite.prerequisites(run)} - trained:
            trained |= first
        if trained:
            in_order = [run for run in suite.runs if run in trained]
            commands[planner.train_command(suite, in_order)] = None
        for command in planner.measure_commands(suite, pairs):
            commands[f"{command} --force"] = None
        for run in trained:
            facts = _recorded(run).get("trained") or {}
            training.append(facts.get("gpu_seconds"))
            devices |= {facts["device"]} if facts else set()
        for run, metric in pairs:
            record = _recorded(run).get("records", {}).get(metric.path(suite.name).name, {})
            measuring.append(record.get("seconds"))
    machines = " and ".join("an " + re.sub(r"NVIDIA (\S+).*", r"\1", name) for name in sorted(devices))
    trains = _time(training, "training", f" on {machines or 'one machine'}") if training else "no training"
    cost = f"{trains}, {_time(measuring, 'measuring')}"
    return {"commands": list(commands), "cost": cost, "devices": sorted(devices)}


def _recorded(run: Run) -> dict[str, Any]:
    """The ``settings.json`` of a run's results, or else of its reference results."""
    found = freshness.recorded_settings(run)
    return found or files.read_json(REFERENCE / run.suite / run.name / freshness.PROOFS)


def _time(seconds: Sequence[float | None], what: str, where: str = "") -> str:
    """ "about 3 min of training on an H200 (1 of 4 times not recorded)"."""
    known = [one for one in seconds if one is not None]
    if not known:
        return f"{what} time not recorded"
    unknown = f" ({len(seconds) - len(known)} of {len(seconds)} times not recorded)"
    return f"{duration(sum(known))} of {what}{where}" + unknown * (len(known) < len(seconds))


def duration(seconds: float) -> str:
    """ "about 1 h 33 min"; for less than a minute in seconds."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"about {max(seconds, 1):.0f} s"
    return "about " + f"{minutes // 60} h {minutes % 60} min".removeprefix("0 h ").removesuffix(" 0 min")
