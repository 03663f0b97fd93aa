"""Which tokens are kept: by part of the text, by frequency, and by place."""

from __future__ import annotations

import ast

import pandas as pd

from .. import drawing, style

GROUPINGS = {
    "kind": "part of text",
    "frequency": "fifth by frequency (1: most frequent)",
    "place": "tenth of the text",
}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Kept share of each group, one panel a grouping.

    Args:
        records: ``keep_ratio_by_word`` records of one run.
    """
    whole = records[records["grouping"] == "kind"]
    mean = 100 * whole["kept_tokens"].sum() / whole["tokens"].sum()
    figure, axes = drawing.panels(len(GROUPINGS), 2.4, sharey=True, width_ratios=(1.5, 1, 1.4))
    for ax, (grouping, label) in zip(axes, GROUPINGS.items(), strict=True):
        table = records[records["grouping"] == grouping].copy()
        if grouping != "kind":
            table = table.sort_values("group", key=lambda g: g.astype(int))
        share = 100 * table["kept_tokens"] / table["tokens"]
        names = table["group"].astype(str).str.replace(" ", "\n")
        ax.bar(names, share, color=style.SIZES[0])
        ax.set_title("Keep ratio")
        ax.axhline(mean, color="0.4", lw=1, ls="--", label=f"all tokens: {mean:.0f} %")
        ax.set_xlabel(label)
        ax.grid(visible=False, axis="x")
    axes[0].set(ylabel="tokens kept (%)", ylim=(0, 100))
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["keep_ratio_by_word"]
    tokens = records[(records["grouping"] == "token") & (records["tokens"] >= 10)]
    ordered = tokens.assign(share=tokens["kept_tokens"] / tokens["tokens"]).sort_values("share")

    def listed(table: pd.DataFrame) -> str:
        return ", ".join(
            f"`{ast.literal_eval(row.group).strip()}` {100 * row.share:.0f} %" for row in table.itertuples()
        )

    caption = f"""**Kept tokens.** Of the hundred most frequent tokens, the least kept are
{listed(ordered.head(6))}, and the most kept are {listed(ordered.tail(6))}. Shown is the share of held-out
tokens, without EOS, that every gate keeps: by kind, frequency and place."""
    return draw(records), caption
