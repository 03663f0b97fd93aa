"""What the measure command measures where it is not told: which runs a quantity is about."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..suite import Run, Suite

_EVERY_RUN = dict.fromkeys(("loss", "loss_curve"), lambda suite: list(suite.runs))
_HEADS_RUN = dict.fromkeys(("decay", "attention_weights"), lambda suite: [suite.heads_run])
_SWEEP_RUN = dict.fromkeys(
    ("epsilon_sweep", "pruned_mass", "block_size", "long_context"), lambda suite: [suite.sweep_run]
)
# All other quantities are about the runs trained with ACP.
_RUNS: dict[str, Callable[[Suite], list[Run]]] = {**_EVERY_RUN, **_HEADS_RUN, **_SWEEP_RUN}

# Options of the command that go to ``measure`` as keywords, and the quantities that know them.
OPTIONS = {"heads": ("decay", "attention_weights")}


def select(suite: Suite, quantities: list[str], names: list[str] | None = None) -> list[tuple[Run, str]]:
    """(run, quantity) pairs to measure, a run's together, so that its weights are read once.

    Args:
        names: the runs for all quantities; None takes the runs that each quantity is about.

    Raises:
        SuiteError: the suite has no run of a name.
    """
    if names is not None:
        return list(itertools.product([suite.run(name) for name in names], quantities))
    runs = {q: _RUNS.get(q, lambda suite: suite.select(acp=True))(suite) for q in quantities}
    return [(run, quantity) for run in suite.runs for quantity in quantities if run in runs[quantity]]
