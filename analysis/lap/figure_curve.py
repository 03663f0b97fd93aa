"""Accuracy against compression, soft and removed, and free writing; the run without gates beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, Word
from . import models
from .table_scores import gated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"soft": "#0072B2", "straight_through": "#009E73", "hard_concrete": "#D55E00"}
UNGATED = "0.2"
# Shares kept that differ less may be chance. Trainings of one run differ on a GPU: of the texts looked at
# while training, exact-10 of lap-h200 kept 56, 54, 55 and 63 % at the end, with a standard deviation of 4.
# So two differ by less than 11 in 95 % of cases.
CHANCE = 0.11
# Of an axis: points that are nearer than SAME look like one; from a point to its name; a line of text; below
# FOOT names stand above their points.
SAME, GAP, LINE, FOOT = 0.012, 0.05, 0.08, 0.2
FREE = {"bleu": ("D", "BLEU"), "exact_match": ("s", "whole texts")}


class Point(NamedTuple):
    """A point of the axes with what is to stand beside it."""

    x: float
    y: float
    name: str
    colour: str


def draw(records: pd.DataFrame) -> Figure:
    """Left a line from each run's soft point (hollow) to its removed one (full); right its free writing.

    Args:
        records: ``reconstruction`` records.
    """
    from matplotlib import pyplot as plt

    one_each(records, ["run", "decoding"], "figure_curve")
    figure, (ax, right) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 3.2), layout="constrained")
    labelled = set()  # settings; a name stands once, at the first of its seeds
    named: dict[Axes, list[Point]] = {ax: [], right: []}
    records = records.sort_values("compression", kind="stable")  # so that names stand in this order
    for _, run in records.groupby("run", sort=False):
        points = run.set_index("decoding")
        first = run.iloc[0]
        gated = pd.notna(first["compression"])
        colour = COLOURS[first["training_mask"]] if gated else UNGATED
        soft, removed, free = (points.loc[name] for name in ("soft", "removed", "free"))
        shares, accuracies = ([one[of] for one in (soft, removed)] for of in ("kept_ratio", "token_accuracy"))
        ax.plot(shares, accuracies, color=colour, lw=0.8, zorder=1)
        ax.scatter(shares[:1], accuracies[:1], 28, "white", edgecolors=colour, zorder=2)
        ax.scatter(shares[1:], accuracies[1:], 28, colour, zorder=3)
        for column, (marker, _) in FREE.items():
            style_of = {"marker": marker, "alpha": 0.7, "zorder": 3, "clip_on": False}
            right.scatter(free["kept_ratio"], free[column], 18, colour, **style_of)
        setting = first["training_mask"], first["gate"], first["compression"]
        if not gated or setting in labelled:
            continue
        labelled.add(setting)
        name = f"λ {first['compression']:g}{models.READINGS[first['gate']]}"
        named[ax].append(Point(shares[1], accuracies[1], f"{name}, {100 * shares[1]:.0f} %", colour))
        named[right] += [Point(free["kept_ratio"], free[column], name, colour) for column in FREE]
    for mask in dict.fromkeys(records.loc[records["compression"].notna(), "training_mask"]):
        ax.scatter([], [], 28, COLOURS[mask], label=f"trained with {models.MASKS[mask]}")
    if records["compression"].isna().any():
        ax.scatter([], [], 28, UNGATED, label="trained without gates")
    ax.scatter([], [], 28, "white", edgecolors="0.5", label="under the soft mask")
    ax.scatter([], [], 28, "0.5", label="tokens removed")
    for marker, name in FREE.values():
        ax.scatter([], [], 18, "0.5", marker=marker, alpha=0.7, label=f"{name}, written freely")
    for axes, score, title in (
        (ax, "token accuracy", "true tokens before"),
        (right, "score", "written freely"),
    ):
        axes.set(xlim=(0, 1.05), ylim=(0, 1.12), xlabel="share of tokens kept", ylabel=score, title=title)
        _name(axes, named[axes])
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _name(ax: Axes, points: list[Point]) -> None:
    """Writes names below their points, with a line to each. Points that look like one share a line."""
    places: list[list[Point]] = []
    for point in points:
        same = [p for p in places if max(abs(p[0].x - point.x), abs(p[0].y - point.y)) < SAME]
        if same:
            same[0].append(point)
        else:
            places.append([point])
    line = {"arrowstyle": "-", "lw": 0.5, "shrinkA": 0, "shrinkB": 2}
    ends: dict[tuple[bool, bool], float] = {}  # where the last name ends, by where names stand
    for place in sorted(places, key=lambda p: -abs(p[0].y - FOOT)):
        x, y, _, colour = place[0]
        names = list(dict.fromkeys(point.name for point in place))
        foot = y < FOOT
        # To the left where another point stands to the right, or the axis ends.
        left = x > 0.8 or any(SAME < other[0].x - x < 0.3 and abs(other[0].y - y) < 0.2 for other in places)
        edge = y + GAP if foot else y - GAP
        if (end := ends.get((left, foot))) is not None:
            edge = max(edge, end) if foot else min(edge, end)
        ends[left, foot] = edge + LINE * len(names) * (1 if foot else -1)
        ax.annotate(
            "\n".join(names),
            (x, y),
            (x - 0.06 if left else x + 0.06, edge),
            ha="right" if left else "left",
            va="bottom" if foot else "top",
            fontsize=7,
            color=colour,
            arrowprops=line | {"color": colour, "relpos": (left, 0.5)},
        )


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["reconstruction"]
    with_gates = records[records["compression"].notna()]
    wide = with_gates.pivot(index="run", columns="decoding", values="token_accuracy")
    gaps = models.each_in_words({run: f"{row.soft - row.removed:+.3f}" for run, row in wide.iterrows()})
    caption = f"""**Accuracy against compression.** Accuracy lost by removal: {gaps}. Left: a full point is a
model with tokens really removed. A hollow point is the same weights under the soft mask. The share that it
keeps is {models.SOFT_RATIO}. Right: texts that the model writes from what is kept alone. A thin
line leads from a point to its λ.
{style.provenance(records)}"""
    return draw(records), caption


def lambda_compresses(reconstruction: pd.DataFrame) -> Verdict:
    """Not met if a larger lambda keeps clearly more than a smaller one, met if the largest keeps clearly less
    than the smallest. Runs have hard concrete gates and differ in lambda alone. *Clearly* is ``CHANCE``."""
    runs = gated(reconstruction, "removed")
    runs = runs[runs["training_mask"] == "hard_concrete"]
    groups = [group.sort_values("compression") for _, group in runs.groupby(["gate", "seed"])]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return Verdict(Word.UNTOLD, "no two runs with hard concrete gates differ in lambda alone")
    ours = "; ".join(
        f"λ {r.compression:g}: {r.kept_ratio:.0%}" for group in groups for r in group.itertuples()
    )
    kept = [group["kept_ratio"].to_numpy() for group in groups]
    if any((shares > np.minimum.accumulate(shares) + CHANCE).any() for shares in kept):
        return Verdict(Word.CONTRADICTED, ours)
    clear = all(shares[-1] < shares[0] - CHANCE for shares in kept)
    return Verdict(Word.MEASURED if clear else Word.UNTOLD, ours)
