"""Table 6: tokens kept in each layer of an encoder of 12."""

from __future__ import annotations

import pandas as pd

from .. import drawing
from . import kept


def tabulate(records: pd.DataFrame) -> drawing.Table:
    """See ``kept.tabulate``."""
    return kept.tabulate(records, "table6")


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    return kept.make(found)


if __name__ == "__main__":
    drawing.main(globals())
