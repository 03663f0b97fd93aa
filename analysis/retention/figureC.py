"""Appendices C and G: the slack of the budget against its bound."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .. import drawing, style


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


def draw(records: pd.DataFrame) -> Figure:
    """Left: tokens counted, open and allowed, of each run; right: lambda A against the gap.

    Args:
        records: ``slackness`` records.
    """
    table = bounds(records)
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 2.6), layout="constrained")
    at = range(len(table))
    for (name, label), colour in zip(
        (("counted_tokens", "sum p"), ("open_tokens", "sum P(z > 0)"), ("budget_tokens", "M")),
        style.SIZES,
        strict=False,
    ):
        left.plot(at, table[name], "o" if name != "budget_tokens" else "_", ms=5, color=colour, label=label)
    left.set_xticks(list(at), [r.replace("-", "-\n", 2) for r in table["run"]], rotation=90, fontsize=5)
    left.set(ylabel="tokens of an example")
    left.legend()
    right.scatter(table["gap_nats"], table["weighted_slack_nats"], s=14, color=style.SIZES[0])
    ends = [*table["gap_nats"], *table["weighted_slack_nats"], 0]
    right.plot([min(ends), max(ends)], [min(ends), max(ends)], color=style.PAPER)
    right.set(xlabel="loss with top-M less loss with soft gates (nats)", ylabel="$\\lambda A$ (nats)")
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["slackness"]
    caption = f"""**Figure C.** Left: the tokens that trained gates stand for, by the paper's count (sum of
p) and by the share of gates that are open, against the budget M. Right: slack A times lambda against the
gap that bounds it (Appendices C and G), for a feasible loss in place of the unknown least one; under the
grey line the bound holds. A model
whose training ends at hard masks minimises another loss than the soft one, so the bound need not hold there.
{style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
