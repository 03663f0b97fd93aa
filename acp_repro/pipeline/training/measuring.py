"""Measures trained runs and writes the records."""

import itertools
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

from ...common.command import choose_device
from ...common.errors import UserError
from .. import freshness
from ..paper import Metric, Suite
from ..provenance import made_on
from ..records import write_records
from ..run import Run


def bring_up_to_date(
    suite: Suite, wanted: Iterable[tuple[Run, Metric]], device: str | None, *, again: bool = False
) -> None:
    """Writes the records that are not up to date and prints their paths; one process at a time.

    Args:
        wanted: the records to write; pairs of one run are consecutive, so that its weights load once.
        again: also measure records that are up to date.
    """
    with freshness.exclusive("measuring", "measures here"):
        stale = []
        for run, metric in wanted:
            if again or not freshness.is_current(suite, run, metric):
                stale.append((run, metric))
            else:
                print(f"{metric.path(run.suite, run.name)}: up to date")
        if stale:
            _measure(suite, stale, choose_device(device))


def _measure(suite: Suite, stale: list[tuple[Run, Metric]], device: Any) -> None:
    failed = 0
    for (run, untrained), pairs in itertools.groupby(
        stale, key=lambda pair: (pair[0], pair[1].untrained(pair[0]))
    ):
        if untrained:
            from .task import Trained  # importing torch takes seconds

            trained = Trained(suite, run, None, None, device, trained_tokens=0)
        else:
            trained = suite.paper.load_task()(run).trained(suite, device)
        for _, metric in pairs:
            begun = time.perf_counter()
            try:
                if not metric.has_library:
                    raise UserError("needs {}: pip install -e '.[{}]'".format(*metric.library))
                rows = metric.measure()(trained)
            except Exception as error:
                if len(stale) == 1:
                    raise
                failed += 1
                if not isinstance(error, UserError):
                    traceback.print_exc()
                print(f"error: {run.name}, {metric.name}: {error}", file=sys.stderr)
                continue
            written = write_records(
                suite,
                run,
                metric,
                rows,
                dtype=run.training.dtype,
                trained_tokens=trained.trained_tokens,
                seconds=round(time.perf_counter() - begun, 1),
                **made_on(device),
            )
            print(written)
        trained.written()
    if failed:
        raise UserError(f"{failed} of {len(stale)} records could not be measured; the reasons are above")
