"""Table 1: every method at 50 % of the tokens."""

from __future__ import annotations

import pandas as pd

from .. import drawing
from . import results


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """See ``results.tabulate``."""
    return results.tabulate(records, "table1")


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    return results.make(found, 50)


if __name__ == "__main__":
    drawing.main(globals())
