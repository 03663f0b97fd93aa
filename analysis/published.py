"""Published values with their places (``paper_values.csv``), and the claims (``claims.toml``)."""

import functools
import importlib.resources
import re
import sys
import tomllib
from dataclasses import dataclass
from typing import Any

import pandas as pd

from acp_repro.pipeline.paper import Claim


@dataclass(frozen=True)
class Published:
    """The published values of one paper; see :func:`published`."""

    package: str
    table: pd.DataFrame

    def range(self, item: str, quantity: str) -> tuple[float, float]:
        """(low, high) of a quantity of a figure or table as a whole."""
        row = self._row(item, quantity)
        return float(row["low"]), float(row["high"])

    def place(self, item: str, quantity: str) -> str:
        """The paper's wording for a quantity of an item as a whole, and its place in the paper."""
        return self._row(item, quantity)["place"]

    def _row(self, item: str, quantity: str) -> pd.Series:
        table = self.table[self.table["size"].isna()]
        rows = table[(table["item"] == item) & (table["quantity"] == quantity)]
        assert len(rows) == 1, f"{self.package}: paper_values.csv has {len(rows)} rows of {item} {quantity}"
        return rows.iloc[0]


@functools.cache
def published(package: str) -> Published:
    """The published values of a paper, from ``paper_values.csv`` of the package of its analysis."""
    with (importlib.resources.files(package) / "paper_values.csv").open(encoding="utf-8") as lines:
        return Published(package, pd.read_csv(lines))


def claims_of(package: str) -> dict[str, tuple[Claim, ...]]:
    """The claims of ``claims.toml`` by their item; "text" has the others. Names in it, as in ``check =
    "figure2.savings_grow"`` and ``{figure2.LIMIT:g}``, are of the package's modules, which are imported."""
    modules = vars(sys.modules[package])
    text = (importlib.resources.files(package) / "claims.toml").read_text(encoding="utf-8")

    def named(words: str) -> Any:
        module, _, name = words.partition(".")
        return getattr(modules[module], name)

    def filled(words: str) -> str:
        return re.sub(r"\{(\w+\.\w+):?([^}]*)\}", lambda m: format(named(m[1]), m[2]), words)

    def claim(entry: dict[str, Any]) -> Claim:
        check = named(entry.pop("check")) if "check" in entry else None
        lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
        words = {key: filled(value) for key, value in entry.items() if isinstance(value, str)}
        return Claim(**entry | lists | words, check=check)

    return {item: tuple(map(claim, entries)) for item, entries in tomllib.loads(text).items()}
