"""Scores of every method at one budget: what Tables 1 and 2 share."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import models

_KEY = ["dataset", "backbone", "method", "gates", "metric"]


def tabulate(records: pd.DataFrame, item: str) -> drawing.Table:
    """One row a method and place of its gates, one column a task and score; below, what the paper prints.

    Args:
        records: ``score`` records.
    """
    test = records[records["split"] == "test"]
    one_each(test, [*_KEY, "seed"], item)
    ours = models.means(test, _KEY, "score_percent").assign(source="measured")
    ours["row"] = [models.row_name(m, g) for m, g in zip(ours["method"], ours["gates"], strict=True)]
    ours["column"] = ours["dataset"] + " " + ours["metric"].str.replace("_", " ")
    paper = models.PUBLISHED.table.query("item == @item").rename(columns={"low": "mean", "method": "row"})
    paper = paper.assign(source="paper", column=paper["quantity"].str.replace("_", " ") + ", paper")
    values = pd.concat([ours, paper], ignore_index=True)
    values = values[["source", "row", "column", "mean", "std", "count"]]
    order = list(models.METHODS)
    names = sorted(
        {(m, g) for m, g in zip(ours["method"], ours["gates"], strict=True)},
        key=lambda p: (order.index(p[0]), p[1]),
    )
    measured = list(dict.fromkeys(ours["column"]))
    quoted = list(dict.fromkeys(paper["column"]))
    rows = []
    for method, gates in names:
        name = models.row_name(method, gates)
        found = ours[ours["row"] == name].set_index("column")
        printed = paper[paper["row"] == models.METHODS[method]].set_index("column")["mean"]
        rows.append(
            {"": name}
            | {c: _cell(found.loc[c]) if c in found.index else "–" for c in measured}
            | {c: f"{printed[c]:.1f}" if c in printed.index else "–" for c in quoted}
        )
    done = {models.METHODS[method] for method, _ in names}
    for name in dict.fromkeys(paper["row"]):
        if name not in done:
            printed = paper[paper["row"] == name].set_index("column")["mean"]
            rows.append(
                {"": f"{name} (quoted)"}
                | dict.fromkeys(measured, "–")
                | {c: f"{printed[c]:.1f}" for c in quoted}
            )
    return drawing.Table(pd.DataFrame(rows), values)


def _cell(row: pd.Series) -> str:
    """ "91.5 ± 0.2 (3)": mean and standard deviation of so many seeds; one seed has no deviation."""
    spread = f" ± {row['std']:.1f} ({row['count']:.0f})" if row["count"] > 1 else ""
    return f"{row['mean']:.1f}{spread}"


def _seeds(table: pd.DataFrame) -> str:
    """What the cells of measured rows are of, in words."""
    counts = table[table["source"] == "measured"]["count"]
    if (counts == 1).all():
        return "one seed"
    alone = "; one seed where none is" if (counts == 1).any() else ""
    return f"mean and standard deviation over seeds (their number in brackets{alone})"


def make(found: drawing.Found, percent: int) -> tuple[drawing.Table, str]:
    records = found.records["score"]
    table = tabulate(records, found.item.name)
    caption = f"""**{found.item.label}.** Scores in percent on the test split at {percent} % of the tokens,
{_seeds(table.values)}. Columns that end in "paper" and rows that
end in "quoted" are the paper's, never run here; a dash is a gap. The paper's dense row falls with the
budget, though dense has none; here it is one row. {style.provenance(records)}"""
    return table, caption
