"""Appendices C and G: the slack of the budget, compared with its bound."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style


def bounds(records: pd.DataFrame) -> pd.DataFrame:
    """One row per gate: lambda A in nats, and the gap, the loss with top-M minus the loss with soft gates."""
    # lambda is per share of tokens or per token; A has the same unit, with the mean length from the budget.
    length = records["budget_tokens"] / records["budget"]
    slack = records["slack_tokens"] / length.where(records["unit"] == "share", 1.0)
    return records.assign(
        length=length,
        weighted_slack_nats=records["multiplier"] * slack,
        gap_nats=records["hard_loss_nats"] - records["soft_loss_nats"],
    )


def counts(records: pd.DataFrame) -> pd.DataFrame:
    """One row per budget: the tokens that trained gates keep by both counts, in percent, mean over gates."""
    percent = 100 * records["budget"] / records["budget_tokens"]
    table = records.assign(counted=records["counted_tokens"] * percent, open=records["open_tokens"] * percent)
    return table.groupby("budget")[["counted", "open"]].mean().reset_index()


def draw(records: pd.DataFrame) -> drawing.Figure:
    """(a) The tokens that each gate keeps by both counts, by budget. (b) The gap minus lambda A.

    Args:
        records: ``slackness`` records, one per trained gate.
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
    more = "".join(
        f" At {100 * row.budget:g} %, the counts are {row.counted:.0f} and {row.open:.0f} %."
        for row in others
    )
    caption = f"""**Figure C.** At a budget of {100 * first.budget:g} %, trained gates keep
{first.counted:.0f} % of the tokens by the paper's count, the sum of p, and {first.open:.0f} % by the number
of open gates.{more} These numbers are means over gates. (a) Both counts and the budget M, one point for
each trained gate and count. (b) The gap minus lambda times the slack A. According to Appendices C and G,
this margin is at least 0 at a minimiser. The bound holds for {within} of {len(table)} trained gates. The
gap is the loss with top-M minus the loss with soft gates, because the least loss within the budget is
unknown. A model whose training ends with hard masks does not minimise the soft loss, so the bound need not
hold for that model."""
    return draw(records), caption
