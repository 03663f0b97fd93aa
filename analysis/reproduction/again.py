"""What measures a claim again, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from acp_repro.pipeline import plan, state
from acp_repro.pipeline.paper import Claim, Item, Suite
from acp_repro.pipeline.run import Run

HALF_HOUR = 1800


@dataclass(frozen=True)
class Again:
    """The commands, in order, and their cost.

    Attributes:
        suite: whose records they make; empty where a test shows the claim.
        training_seconds: what the trainings took that the records are of, on all their GPUs; 0 where nothing
            need be trained.
        untimed: how many of these trainings left no time.
        measuring_seconds: what the measuring took, as far as it is known.
        devices: of these trainings.
    """

    commands: tuple[str, ...]
    suite: str = ""
    training_seconds: float = 0.0
    untimed: int = 0
    measuring_seconds: float = 0.0
    devices: tuple[str, ...] = ()

    @property
    def quick(self) -> bool:
        """Whether it takes less than half an hour of one GPU, by what is known."""
        return not self.untimed and self.training_seconds + self.measuring_seconds < HALF_HOUR

    @property
    def cost(self) -> str:
        """In words: "trains 921 s (NVIDIA H200), then measures 40 s"."""
        if not self.suite:
            return "a test, under a minute on two CPU cores"
        seconds = f"{self.measuring_seconds:,.0f} s" if self.measuring_seconds else "in a time not recorded"
        measures = f"measures {seconds}"
        if not self.training_seconds and not self.untimed:
            return f"trains nothing, {measures}"
        timed = f"{self.training_seconds:,.0f} s ({', '.join(self.devices)})" if self.training_seconds else ""
        untimed = f"{self.untimed} run{'s' * (self.untimed > 1)} of no recorded time" if self.untimed else ""
        return f"trains {' and '.join(filter(None, (timed, untimed)))}, then {measures}"


def by_test(claim: Claim) -> Again | None:
    """The test of a claim that needs no record; None if it has none."""
    return Again((f"python -m pytest -q {claim.test}",)) if claim.test else None


def by_records(claim: Claim, item: Item, suite: Suite, runs: Sequence[Run]) -> Again:
    """Training and measuring of what a claim is judged by, on ``runs`` of a suite.

    Weights that are there are not trained again.
    """
    quantities = [suite.paper.quantity(name) for name in claim.quantities]
    of_runs = [quantity for quantity in quantities if not quantity.command]
    commands = [quantity.command_for(suite.name) for quantity in quantities if quantity.command]
    pairs = [(run, q) for q in of_runs for run in item.runs_with(suite, q) if run in runs]
    measured = [run for run in runs if any(run is other for other, _ in pairs)]
    trained = (
        {run for run, quantity in pairs if not quantity.untrained(run)} if suite.weights is None else set()
    )
    while first := {needed for run in trained for needed in suite.prerequisites(run)} - trained:
        trained |= first
    if trained:
        ordered = [run for run in suite.runs if run in trained]
        commands.append(plan.train_command(suite, ordered))
    commands += [f"{command} --again" for command in plan.measure_commands(suite, pairs)]
    recorded = {run: state.recorded_settings(run) for run in {*trained, *measured}}
    known = [recorded[run]["trained"] for run in trained if recorded[run].get("trained")]
    return Again(
        tuple(commands),
        suite.name,
        sum(one["gpu_seconds"] for one in known),
        len(trained) - len(known),
        sum(state.measuring_seconds(run, quantity) for run, quantity in pairs),
        tuple(sorted({one["device"] for one in known})),
    )


def together(each: Sequence[Again]) -> Again:
    """What makes the records of several suites, as one of the suite with the longest training."""
    return Again(
        tuple(command for one in each for command in one.commands),
        max(each, key=lambda one: one.training_seconds).suite,
        sum(one.training_seconds for one in each),
        sum(one.untimed for one in each),
        sum(one.measuring_seconds for one in each),
        tuple(sorted({device for one in each for device in one.devices})),
    )
