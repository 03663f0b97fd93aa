"""Appendices C and G: the slack of the budget against its bound."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style


def bounds(records: pd.DataFrame) -> pd.DataFrame:
    """One row a gate: lambda A, in nats, and what the loss with top-M exceeds the loss with soft gates by."""
    table = records.copy()
    # lambda is per share of tokens or per token; A in the same unit, with the mean length from the budget.
    length = table["budget_tokens"] / table["budget"]
    slack = table["slack_tokens"] / length.where(table["unit"] == "share", 1.0)
    return table.assign(
        length=length,
        weighted_slack_nats=table["multiplier"] * slack,
        gap_nats=table["hard_loss_nats"] - table["soft_loss_nats"],
    )


def counts(records: pd.DataFrame) -> pd.DataFrame:
    """One row a budget: what trained gates count as kept, in percent of the tokens, in the mean over them."""
    percent = 100 * records["budget"] / records["budget_tokens"]
    names = {"counted_tokens": "counted", "open_tokens": "open"}
    shares = {short: records[name] * percent for name, short in names.items()}
    return records.assign(**shares).groupby("budget")[list(shares)].mean().reset_index()


def draw(records: pd.DataFrame) -> drawing.Figure:
    """(a) What each gate counts as kept, by budget. (b) By how much the gap is above lambda A.

    Args:
        records: ``slackness`` records, one a trained gate.
    """
    table = bounds(records)
    budgets = sorted(table["budget"].unique())
    figure, (left, right) = drawing.panels(2, 2.5)
    ways = {"counted_tokens": ("sum of p", -0.2), "open_tokens": ("open gates", 0.2)}
    for colour, (name, (label, shift)) in zip(style.SIZES, ways.items(), strict=False):
        for at, budget in enumerate(budgets):
            some = table[table["budget"] == budget]
            x = at + shift + drawing.strip(len(some), 0.3)
            left.scatter(x, 100 * some[name] / some["length"], 9, colour, lw=0, label=label)
    for at, budget in enumerate(budgets):
        left.hlines(100 * budget, at - 0.45, at + 0.45, color="0.2", lw=1.2, label="the budget M")
    left.set_xticks(range(len(budgets)), [f"budget {100 * budget:g} %" for budget in budgets])
    left.set(ylabel="tokens kept (% of an example)", ylim=(0, None))
    left.set_title("Kept tokens by two counts")
    above = (table["gap_nats"] - table["weighted_slack_nats"]).sort_values().to_numpy()
    right.axhspan(0, max(above.max(), 0) + 0.01, color="0.93", lw=0, zorder=0, label="the bound holds")
    right.plot(range(len(above)), above, "o", ms=3, color="0.2")
    right.set_title("Margin of the bound")
    right.set(xlabel="trained gates, sorted", ylabel="hard − soft loss − $\\lambda A$ (nats)")
    drawing.legend(figure, 5)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["slackness"]
    first, *others = counts(records).itertuples()
    table = bounds(records)
    within = (table["weighted_slack_nats"] <= table["gap_nats"]).sum()
    more = "".join(f" At {100 * row.budget:g} %: {row.counted:.0f} and {row.open:.0f} %." for row in others)
    caption = f"""**Figure C.** At a budget of {100 * first.budget:g} %, trained gates count as
{first.counted:.0f} % of the tokens by the paper's sum of p and as {first.open:.0f} % by open gates.{more}
These are means over gates. (a) Both counts beside the budget M. Each point is a trained gate. (b) The
gap, less the slack A times lambda that it bounds (Appendices C and G): what the loss with top-M exceeds the
loss with soft gates by. The bound holds for {within} of {len(table)} gates. The least loss is unknown, and a
feasible loss stands for it. A model whose training ends at hard masks minimises another loss than the soft
one, so the bound need not hold there."""
    return draw(records), caption
