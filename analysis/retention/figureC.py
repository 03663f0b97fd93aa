"""Appendices C and G: the slack of the budget against its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from . import models

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bounds(records: pd.DataFrame) -> pd.DataFrame:
    """One row a gate: lambda A, in nats, and what the loss with top-M exceeds the loss with soft gates by."""
    table = records.copy()
    per_unit = (table["unit"] == "share").map({True: 1.0, False: 0.0})
    # lambda is per share of tokens or per token; A in the same unit, with the mean length from the budget.
    length = table["budget_tokens"] / table["budget"]
    slack = table["slack_tokens"] / length.where(per_unit > 0, 1.0)
    return table.assign(
        weighted_slack_nats=table["multiplier"] * slack,
        gap_nats=table["hard_loss_nats"] - table["soft_loss_nats"],
    )


def counts(records: pd.DataFrame) -> pd.DataFrame:
    """One row a budget: what trained gates count as kept, in percent of the tokens, in the mean over them."""
    percent = 100 * records["budget"] / records["budget_tokens"]
    names = {"counted_tokens": "counted", "open_tokens": "open"}
    shares = {short: records[name] * percent for name, short in names.items()}
    return records.assign(**shares).groupby("budget")[list(shares)].mean().reset_index()


def draw(records: pd.DataFrame) -> Figure:
    """Left: tokens counted, open and allowed, a row a task, budget and place; right: lambda A and the gap.

    Args:
        records: ``slackness`` records; seeds of one setting share a row.
    """
    from matplotlib import pyplot as plt

    table = bounds(records)
    key = ["dataset", "budget", "gates"]
    rows = list(dict.fromkeys(table[key].itertuples(index=False, name=None)))
    tasks, places = list(dict.fromkeys(table["dataset"])), list(models.PLACES)
    rows.sort(key=lambda row: (places.index(row[2]), tasks.index(row[0]), -row[1]))
    at = [rows.index(row) for row in table[key].itertuples(index=False, name=None)]
    length = table["budget_tokens"] / table["budget"]
    height = max(2.6, 0.17 * len(rows) + 0.9)
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, height), layout="constrained")
    for (name, label, mark), colour in zip(
        (("counted_tokens", "sum p", "o"), ("open_tokens", "sum P(z > 0)", "o"), ("budget_tokens", "M", "|")),
        style.SIZES,
        strict=False,
    ):
        left.plot(100 * table[name] / length, at, mark, ms=4 if mark == "o" else 8, color=colour, label=label)
    words = [f"{task} {100 * budget:g} %, {models.PLACES[gates]}" for task, budget, gates in rows]
    left.set_yticks(range(len(rows)), words, fontsize=6.5)
    left.set(xlabel="tokens (% of an example)", xlim=(0, None), ylim=(len(rows) - 0.4, -0.6))
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3, columnspacing=1, handletextpad=0.2)
    right.scatter(table["gap_nats"], table["weighted_slack_nats"], s=14, color=style.SIZES[0])
    # Each axis has the points and 0; the line would stretch the one of lambda A to twenty times its points.
    right.margins(0.08)
    right.update_datalim([(0, 0)])
    right.set(xlim=right.get_xlim(), ylim=right.get_ylim())
    right.axline((0, 0), slope=1, color=style.PAPER, zorder=0)
    right.locator_params(nbins=5)
    right.set(xlabel="loss with top-M less loss with soft gates (nats)", ylabel="$\\lambda A$ (nats)")
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["slackness"]
    first, *others = counts(records).itertuples()
    table = bounds(records)
    within = (table["weighted_slack_nats"] <= table["gap_nats"]).sum()
    more = "".join(f" At {100 * row.budget:g} %: {row.counted:.0f} and {row.open:.0f} %." for row in others)
    caption = f"""**Figure C.** At a budget of {100 * first.budget:g} %, trained gates count as
{first.counted:.0f} % of the tokens by the paper's sum of p and as {first.open:.0f} % by open gates.{more}
These are means over gates. Left: both counts beside the budget M. Each mark is a seed. Right: slack A times
lambda against the gap that bounds it (Appendices C and G). On the grey line both are equal. To its right the
bound holds, as for {within} of {len(table)} gates. The two axes have different scales. The least loss is
unknown, and a feasible loss stands for it. A model whose training ends at hard masks minimises another loss
than the soft one, so the bound need not hold there. {style.provenance(records)}"""
    return draw(records), caption
