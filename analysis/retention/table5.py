"""Tables 5 and 6: tokens kept in each layer by each schedule."""

import pandas as pd

from acp_repro.papers.retention.runs import RetentionRun, RetentionSuite

from .. import drawing
from ..tables import one_each
from ..verdict import Verdict
from . import naming


def tabulate(records: pd.DataFrame, item: str) -> drawing.Table:
    """One row per layer, one column per budget and schedule in percent, and the paper's columns."""
    one_each(records, ["budget", "schedule", "layer"], item)
    values = records[["budget", "schedule", "layer", "keep_ratio"]].copy()
    printed = naming.PUBLISHED.table.query("item == @item").set_index("quantity")["low"]
    rows = []
    for layer in sorted(values["layer"].unique()):
        cells = {"layer": "embedding" if layer == 0 else str(layer)}
        for (budget, schedule), of_column in values.groupby(["budget", "schedule"], sort=False):
            share = of_column.set_index("layer")["keep_ratio"][layer]
            cells[f"{100 * budget:g} %, {schedule}"] = f"{100 * share:.1f} %"
        for budget in sorted(values["budget"].unique(), reverse=True):
            key = f"kept_layer{layer}_{100 * budget:g}"
            cells[f"{100 * budget:g} %, paper"] = f"{printed[key]:.1f} %" if key in printed.index else "–"
        rows.append(cells)
    return drawing.Table(pd.DataFrame(rows), values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    records = context.records["keep_ratio_by_layer"]
    most = budget_holds(records).ours
    caption = f"""**{context.item.label}.** {most}. The table has the share of all tokens of the test split
that remain after each layer. A layer keeps floor(rho T) tokens, and at least
one. With the constant schedule, T counts the tokens of the text. With the geometric schedule, T counts the
tokens that reach the layer. The profile schedule uses the paper's keep ratios. The paper's columns exceed
their budgets, as the paper's text says."""
    return tabulate(records, context.item.name), caption


def budget_holds(keep_ratio_by_layer: pd.DataFrame) -> Verdict:
    layers = keep_ratio_by_layer[keep_ratio_by_layer["layer"] > 0]
    most = 100 * layers.groupby(["budget", "schedule"], sort=False)["keep_ratio"].max()
    own = most.drop("profile", level="schedule", errors="ignore")
    over = own - 100 * own.index.get_level_values("budget")
    budget = over.idxmax()[0]
    words = [
        ", ".join(f"{share:.1f} % ({schedule})" for schedule, share in shares.droplevel(0).items())
        + f" at a budget of {100 * of:g} %"
        for of, shares in most.groupby("budget", sort=False)
    ]
    profile = f" (profile: {most[budget, 'profile']:.1f} %)" if len(most) > len(own) else ""
    short = f"a layer keeps at most {own[budget].max():.1f} % at a budget of {100 * budget:g} %{profile}"
    return Verdict.of((over <= 0).all(), f"Largest keep ratio of a layer: {' and '.join(words)}", short)


def one_a_budget(suite: RetentionSuite, deep: bool) -> list[RetentionRun]:
    """One run of Adaptive Retention per budget, in an encoder of 12 blocks if ``deep``, else of fewer.

    The schedules depend on nothing else.
    """
    of_budget: dict[float, RetentionRun] = {}
    for run in suite.adaptive:
        if (run.backbone.num_hidden_layers == 12) == deep:
            of_budget.setdefault(run.budget, run)
    return list(of_budget.values())
