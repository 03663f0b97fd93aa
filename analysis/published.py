"""The numbers that papers print, each with its place: ``paper_values.csv`` of a paper's analysis."""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import dataclass

import pandas as pd

COLUMNS = ("item", "quantity", "low", "high", "unit", "place", "size", "context_length_tokens", "method")


@dataclass(frozen=True)
class Published:
    """The table of one paper; see :func:`published`.

    Attributes:
        table: one row per number, with :data:`COLUMNS`. Rows without a size are of an item as a whole.
    """

    package: str
    table: pd.DataFrame

    def range(self, item: str, quantity: str) -> tuple[float, float]:
        """(low, high) of a quantity of a figure or table as a whole.

        Raises:
            LookupError: the paper prints none.
        """
        row = self._row(item, quantity)
        return float(row["low"]), float(row["high"])

    def place(self, item: str, quantity: str) -> str:
        """The words of a quantity of an item as a whole, and where they stand.

        Raises:
            LookupError: the paper prints none.
        """
        return self._row(item, quantity)["place"]

    def _row(self, item: str, quantity: str) -> pd.Series:
        table = self.table[self.table["size"].isna()]
        rows = table[(table["item"] == item) & (table["quantity"] == quantity)]
        if len(rows) != 1:
            raise LookupError(f"{self.package}: paper_values.csv has {len(rows)} rows of {item} {quantity}")
        return rows.iloc[0]


@functools.cache
def published(package: str) -> Published:
    """What a paper prints; an empty table where ``package`` has no ``paper_values.csv``."""
    file = importlib.resources.files(package) / "paper_values.csv"
    if not file.is_file():
        return Published(package, pd.DataFrame(columns=COLUMNS))
    with file.open(encoding="utf-8") as lines:
        return Published(package, pd.read_csv(lines))
