"""Table 1: downstream tasks with and without ACP, FoX (Pro) (Section 4.2)."""

from __future__ import annotations

import pandas as pd

from .. import drawing
from . import downstream


def tabulate(lm_eval: pd.DataFrame, lm_eval_items: pd.DataFrame) -> drawing.Table:
    """See :func:`downstream.tabulate`."""
    return downstream.tabulate("table1", lm_eval, lm_eval_items)


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    table = tabulate(found.records["lm_eval"], found.records["lm_eval_items"])
    return table, downstream.caption(found, "pro")


if __name__ == "__main__":
    drawing.main(globals())
