"""Tokens kept in each layer by each schedule: what Tables 5 and 6 share."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import models


def tabulate(records: pd.DataFrame, item: str) -> drawing.Table:
    """One row a layer, one column a budget and schedule, in percent of the tokens; beside them the paper's.

    Args:
        records: ``tokens_kept`` records of one run a budget.
    """
    one_each(records, ["budget", "schedule", "layer"], item)
    values = records[["budget", "schedule", "layer", "kept_share"]].copy()
    printed = models.PUBLISHED.table.query("item == @item").set_index("quantity")["low"]
    rows = []
    for layer in sorted(values["layer"].unique()):
        cells = {"layer": "embedding" if layer == 0 else str(layer)}
        for (budget, schedule), of_column in values.groupby(["budget", "schedule"], sort=False):
            share = of_column.set_index("layer")["kept_share"][layer]
            cells[f"{100 * budget:g} %, {schedule}"] = f"{100 * share:.1f} %"
        for budget in sorted(values["budget"].unique(), reverse=True):
            key = f"kept_layer{layer}_{100 * budget:g}"
            cells[f"{100 * budget:g} %, paper"] = f"{printed[key]:.1f} %" if key in printed.index else "–"
        rows.append(cells)
    return drawing.Table(pd.DataFrame(rows), values)


def make(found: drawing.Found) -> tuple[drawing.Table, str]:
    records = found.records["tokens_kept"]
    caption = f"""**{found.item.label}.** Share of all tokens of the test split that go on after each layer:
M is floor(rho T) of the original tokens (constant) or of what reaches the layer (geometric), at least one
token; "profile" sets the paper's own shares. The paper's columns exceed the budget that they are of, as its
own text says. {style.provenance(records)}"""
    return tabulate(records, found.item.name), caption
