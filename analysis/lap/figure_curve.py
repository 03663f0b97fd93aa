"""Accuracy against compression, soft and removed, and free writing; the run without gates beside them."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from . import naming

COLOURS = {"soft": "#0072B2", "straight_through": "#009E73", "hard_concrete": "#D55E00"}
UNGATED = "0.2"
FREE = {"bleu": ("D", "BLEU"), "exact_match": ("s", "whole texts")}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Left a line from each run's soft point (hollow) to its removed one (full); right its free writing.

    Args:
        records: ``reconstruction`` records.
    """
    one_each(records, ["run", "decoding"], "figure_curve")
    figure, (left, right) = drawing.panels(2, 2.9)
    after: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
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
        after.setdefault(name, []).append(accuracies[1])
        whole.setdefault(name, []).append(100 * points.loc["free", "exact_match"])
    left.plot([], [], "o", color="0.5", mfc="white", label="under the soft mask")
    left.plot([], [], "o", color="0.5", label="tokens removed")
    for marker, name in FREE.values():
        right.plot([], [], marker, color="0.5", label=f"{name}, written freely")
    left.set_title("Accuracy")
    right.set_title("Exact match")
    left.set_ylabel("token accuracy, true tokens before")
    right.set_ylabel("score, written freely")
    for ax in (left, right):
        ax.set(xlim=(0, 1.05), ylim=(0, 1.05), xlabel="share of tokens kept")
    drawing.legend(figure)
    return figure


def _listed(values: dict[str, list[float]], form: str) -> str:
    return ", ".join(f"{style.span(pd.Series(each), form)} ({name})" for name, each in values.items())


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["reconstruction"]
    with_gates = records[records["compression"].notna()]
    wide = with_gates.pivot(index="run", columns="decoding", values="token_accuracy")
    gaps = naming.each_in_words({run: f"{row.soft - row.removed:+.3f}" for run, row in wide.iterrows()})
    caption = f"""**Accuracy against compression.** Accuracy lost by removal: {gaps}. (a) A full point is a
model with tokens really removed. A hollow point is the same weights under the soft mask. The share that it
keeps is {naming.SOFT_RATIO}. (b) Texts that the model writes from what is kept alone."""
    return draw(records), caption
