"""Appendix H: Rademacher complexity of a linear class under random retention."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict


def draw(records: pd.DataFrame) -> drawing.Figure:
    """The measured ratio, the paper's M/T, and the square root of M/T, from ``complexity`` records."""
    table = one_each(records, ["kept_tokens"], "figureH").sort_values("kept_tokens")
    share = table["kept_tokens"] / table["tokens"]
    figure, ax = drawing.panels()
    ax.plot(share, table["claimed_ratio"], color=style.PAPER, label="$M/T$, Appendix H")
    ax.plot(share, table["root_ratio"], color=style.SIZES[1], label="$\\sqrt{M/T}$")
    ax.plot(share, table["complexity_ratio"], "o", color=style.SIZES[0], label="measured")
    ax.set(xlabel="keep ratio $M/T$", ylabel="complexity, relative to all tokens")
    ax.legend()
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["complexity"]
    caption = f"""**Figure H.** The relative complexity of a pruned class is
{complexity_bounded(records).ours}. The inputs keep M of {records["tokens"].max()} tokens at random. The
relative complexity is the empirical Rademacher complexity of linear predictors of norm 1 on these inputs,
divided by the complexity with all tokens."""
    return draw(records), caption


def complexity_bounded(complexity: pd.DataFrame) -> Verdict:
    complexity = complexity[complexity["kept_tokens"] < complexity["tokens"]]  # the ratio of all is 1
    over = complexity["complexity_ratio"] / complexity["claimed_ratio"]
    off = (complexity["complexity_ratio"] / complexity["root_ratio"] - 1).abs().max()
    short = f"the complexity ratio is up to {over.max():.1f} times M/T"
    words = (
        f"up to {over.max():.1f} times the claimed M/T, and equal to the square root of M/T within "
        f"{100 * off:.2f} %"
    )
    return Verdict.of((over <= 1.01).all(), words, short, n=len(over), unit="simulation")
