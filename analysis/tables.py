"""Checks for tables derived from records, and the Markdown writer."""

from collections.abc import Iterable, Sequence

import pandas as pd

from acp_repro.pipeline.errors import RecordError


class UnfitRecords(RecordError, ValueError):
    """The records exist but are not sufficient for a figure, table or criterion."""


def one_each(table: pd.DataFrame, key: Sequence[str], what: str) -> pd.DataFrame:
    """Returns ``table`` if its rows have distinct ``key``, so that nothing is averaged silently."""
    key = list(key)
    twice = table[table.duplicated(key)][key].drop_duplicates()
    if len(twice):
        named = ", ".join(f"{column} = {value}" for column, value in twice.to_dict("records")[0].items())
        raise UnfitRecords(f"{what}: more than one record for {named}")
    return table


def some(table: pd.DataFrame | pd.Series | None, what: str) -> pd.DataFrame | pd.Series:
    """Returns ``table`` if it exists and has a row."""
    if table is None or table.empty:
        raise UnfitRecords(f"{what}: no record")
    return table


def side_by_side(
    table: pd.DataFrame, key: Sequence[str], column: str, value: str, sides: tuple[str, str], what: str
) -> pd.DataFrame:
    """Joins the rows of two kinds: columns ``key``, and ``value`` of each kind under the kind's name."""
    key = list(key)
    first, second = (
        one_each(table[table[column] == side], key, what)[[*key, value]].rename(columns={value: side})
        for side in sides
    )
    both = first.merge(second, on=key, how="left", validate="one_to_one")
    if both.empty or len(first) != len(second) or both[list(sides)].isna().any(axis=None):
        raise UnfitRecords(f"{what}: every run needs a record of {column} {sides[0]} and one of {sides[1]}")
    return both


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """A Markdown table of text cells; ``right`` aligns all columns but the first to the right."""
    rule = ["---", *["---:" if right else "---"] * (len(header) - 1)]
    cells = ([" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in (header, *rows))
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"| {' | '.join(rule)} |", *lines[1:]])
