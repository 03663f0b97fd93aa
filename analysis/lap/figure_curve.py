"""Accuracy against compression: each run twice, under the soft mask and with tokens really removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.chain.paper import Claim, Item

from .. import drawing, style
from ..tables import one_each
from ..verdict import Status, Verdict
from . import models
from .table_scores import gated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"soft": "#0072B2", "straight_through": "#009E73", "hard_concrete": "#D55E00"}


def draw(records: pd.DataFrame) -> Figure:
    """A line from each run's soft point (hollow) to its removed one (full); a square for free writing.

    Args:
        records: ``reconstruction`` records of gated runs.
    """
    from matplotlib import pyplot as plt

    one_each(records, ["run", "decoding"], "figure_curve")
    figure, ax = plt.subplots(figsize=(style.COLUMN_INCHES * 1.4, 3.2), layout="constrained")
    low = 0  # runs at the foot of the axes, whose names stand above each other
    named: list[tuple[float, float]] = []  # points whose names stand to their right
    for _, run in records.groupby("run", sort=False):
        points = run.set_index("decoding")
        colour = COLOURS[run["training_mask"].iloc[0]]
        soft, removed, free = (points.loc[name] for name in ("soft", "removed", "free"))
        ax.plot(
            [soft["kept_ratio"], removed["kept_ratio"]],
            [soft["token_accuracy"], removed["token_accuracy"]],
            color=colour,
            lw=0.8,
            zorder=1,
        )
        ax.scatter(soft["kept_ratio"], soft["token_accuracy"], 28, "white", edgecolors=colour, zorder=2)
        ax.scatter(removed["kept_ratio"], removed["token_accuracy"], 28, colour, zorder=3)
        ax.scatter(free["kept_ratio"], free["token_accuracy"], 16, colour, marker="s", alpha=0.6, zorder=3)
        at_foot = removed["token_accuracy"] < 0.2
        place = removed["kept_ratio"], removed["token_accuracy"]
        to_left = any(abs(x - place[0]) < 0.06 and abs(y - place[1]) < 0.1 for x, y in named)
        offset = (7, 4 + 9 * low) if at_foot else (-4 if to_left else 4, -9)
        low += at_foot
        if not (at_foot or to_left):
            named.append(place)
        ax.annotate(
            f"λ {run['compression'].iloc[0]:g}{models.READINGS[run['gate'].iloc[0]]}",
            place,
            offset,
            ha="right" if to_left and not at_foot else "left",
            textcoords="offset points",
            fontsize=7,
            color=colour,
        )
    for mask in dict.fromkeys(records["training_mask"]):
        ax.scatter([], [], 28, COLOURS[mask], label=f"trained with {models.MASKS[mask]}")
    ax.scatter([], [], 28, "white", edgecolors="0.3", label="under the soft mask")
    ax.scatter([], [], 28, "0.3", label="tokens removed")
    ax.scatter([], [], 16, "0.3", marker="s", alpha=0.6, label="tokens removed, written freely")
    ax.set(xlim=(0, 1.05), ylim=(0, 1.03), xlabel="share of tokens kept", ylabel="token accuracy")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["reconstruction"]
    wide = records.pivot(index="run", columns="decoding", values="token_accuracy")
    gaps = "; ".join(f"{run}: {row.soft - row.removed:+.3f}" for run, row in wide.iterrows())
    caption = f"""**Accuracy against compression.** A hollow point is the model under the soft mask, at
{models.SOFT_RATIO}; the full point is the same weights with tokens really removed. Accuracy lost by
removal: {gaps}. {style.provenance(records)}"""
    return draw(records), caption


def lambda_compresses(reconstruction: pd.DataFrame) -> Verdict:
    """Met if no larger lambda keeps more, among runs with hard concrete gates that differ in it alone."""
    runs = gated(reconstruction, "removed")
    runs = runs[runs["training_mask"] == "hard_concrete"]
    groups = [group.sort_values("compression") for _, group in runs.groupby(["gate", "seed"])]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return Verdict(Status.UNDECIDED, "no two runs with hard concrete gates differ in lambda alone")
    ours = "; ".join(
        f"λ {r.compression:g}: {r.kept_ratio:.0%}" for group in groups for r in group.itertuples()
    )
    return Verdict.of(all((group["kept_ratio"].diff().dropna() <= 0).all() for group in groups), ours)


CLAIMS = (
    Claim(
        "Lambda trades accuracy for compression",
        "Section Loss Function: lambda controls how much we care about compression against accuracy",
        "among runs with hard concrete gates and one seed, no larger lambda keeps more tokens",
        ("reconstruction",),
        lambda_compresses,
    ),
)

ITEMS = (
    Item(
        "figure_curve",
        "Accuracy against compression, soft and removed",
        ("reconstruction",),
        lambda suite: suite.gated,
        "gates",
        CLAIMS,
        ours=True,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
