"""Accuracy and free-running scores against the keep ratio, with runs without gates as a baseline."""

from __future__ import annotations

import pandas as pd

from .. import drawing
from ..tables import one_each
from . import naming

COLOURS = {"soft": "#0072B2", "straight_through": "#009E73", "hard_concrete": "#D55E00"}
UNGATED = "0.2"
FREE = {"bleu": ("D", "BLEU"), "exact_match": ("s", "exact match")}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """(a) Each run under its soft mask (hollow), connected to the same run with tokens removed (filled).
    (b) The free-running scores.

    Args:
        records: ``reconstruction`` records.
    """
    one_each(records, ["run", "decoding"], "figure_curve")
    figure, (left, right) = drawing.panels(2, 2.9)
    for _, run in records.groupby("run", sort=False):
        points, first = run.set_index("decoding"), run.iloc[0]
        gated = pd.notna(first["compression"])
        colour = COLOURS[first["training_mask"]] if gated else UNGATED
        name = naming.MASKS[first["training_mask"]] if gated else "no gates"
        shares, accuracies = (
            [points.loc[way, of] for way in ("soft", "removed")] for of in ("keep_ratio", "token_accuracy")
        )
        left.plot(shares, accuracies, color=colour, lw=0.8, zorder=1)
        left.plot(shares[0], accuracies[0], "o", color=colour, mfc="white", ms=5)
        left.plot(shares[1], accuracies[1], "o", color=colour, ms=5, label=name)
        for column, (marker, _) in FREE.items():
            free = points.loc["free"]
            right.plot(free["keep_ratio"], free[column], marker, color=colour, alpha=0.7, clip_on=False)
    left.plot([], [], "o", color="0.5", mfc="white", label="under the soft mask")
    left.plot([], [], "o", color="0.5", label="tokens removed")
    for marker, name in FREE.values():
        right.plot([], [], marker, color="0.5", label=f"{name}, free-running")
    left.set(title="Teacher forcing", ylabel="token accuracy")
    right.set(title="Free-running", ylabel="score")
    for ax in (left, right):
        ax.set(xlim=(0, 1.05), ylim=(0, 1.05), xlabel="keep ratio")
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["reconstruction"]
    with_gates = records[records["compression"].notna()]
    wide = with_gates.pivot(index="run", columns="decoding", values="token_accuracy")
    gaps = naming.each_in_words({run: f"{row.soft - row.removed:+.3f}" for run, row in wide.iterrows()})
    caption = f"""**Accuracy against compression.** Soft-mask accuracy minus accuracy after removal: {gaps}.
(a) Token accuracy with teacher forcing. A filled point is a model whose dropped tokens are removed from the
tensors. A line connects the filled point to the hollow point of the same weights under the soft mask. The
keep ratio of a hollow point is {naming.SOFT_RATIO}. (b) Scores of the texts that the model decodes from the
kept vectors alone."""
    return draw(records), caption
