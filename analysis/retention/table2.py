"""Table 2: every method at 30 % of the tokens."""

from __future__ import annotations

import pandas as pd

from .. import drawing
from . import results


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """See ``results.tabulate``."""
    return results.tabulate(records, "table2")


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    return results.make(found, 30)


if __name__ == "__main__":
    drawing.main(globals())
