"""Figure A1: the attention weight that every head really loses, beside the bound of Appendix A."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import models, sweeps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SET, REACHED = style.SIZES[:2]
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 3, "handletextpad": 0.2}


def draw(records: pd.DataFrame) -> Figure:
    """Left: pruned mass of each head. Right: delta of each head, and where epsilon would be reached.

    Args:
        records: ``pruned_mass`` records of one run.
    """
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    one_each(records, ["run", "layer", "head"], "pruned_mass")
    heads = records.sort_values("largest_pruned_mass", ascending=False, na_position="last")
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 2.8), layout="constrained")
    _masses(left, heads)
    _slack(right, heads)
    for ax in (left, right):
        ax.set_xlabel("heads, by the most that a row loses")
        ax.set_xlim(0.2, len(heads) + 0.8)
        ax.xaxis.set_major_locator(MaxNLocator(min(len(heads), 9), integer=True))
    return figure


def _masses(ax: Axes, heads: pd.DataFrame) -> None:
    """The exponents fill orders of magnitude themselves, so the axis is logarithmic in them."""
    x, size = np.arange(1, len(heads) + 1), 4 if len(heads) <= 50 else 2
    # A weight that float64 cannot tell from 0 stands at the smallest number that it can.
    digits = {
        name: -np.log10(heads[f"{name}_pruned_mass"].clip(lower=np.finfo(float).smallest_subnormal))
        for name in ("largest", "q99", "median")
    }
    ax.vlines(x, digits["largest"], digits["median"], color=SET, linewidth=size / 3, alpha=0.5)
    for name, marker, label in (
        ("largest", "o", "largest of all rows"),
        ("q99", "_", "99 % quantile"),
        ("median", "v", "median"),
    ):
        ax.plot(
            x,
            digits[name],
            marker,
            color=SET,
            markersize=size,
            label=label,
            markerfacecolor="white" if name == "median" else SET,
        )
    bound = -heads["log_pruning_tolerance"].iloc[0] / np.log(10)
    ax.axhline(bound, color="0.25")
    ax.axhspan(1, bound, color="0.92", linewidth=0, zorder=0)
    ax.annotate(
        r"excluded by the proof: $\epsilon$ or more",
        (0.5, bound),
        (0, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="center",
        fontsize=7,
    )
    ax.set_yscale("log")
    ax.set_ylim(max(30.0, 1.3 * np.nanmax([*digits["median"], 0])), 2.5)
    ticks = [t for t in (3, 5, 10, 20, 50, 100, 200, 300) if t < ax.get_ylim()[0]]
    ax.set_yticks(ticks, [sweeps.power_of_ten(10.0**-t) for t in ticks])
    ax.minorticks_off()
    ax.set_title("Attention weight that a row loses")
    ax.legend(**BELOW)


def _slack(ax: Axes, heads: pd.DataFrame) -> None:
    x, size = np.arange(1, len(heads) + 1), 4 if len(heads) <= 50 else 2
    delta = heads["threshold_nats"]
    reached = delta + heads["threshold_slack_nats"]
    ax.vlines(x, delta, reached, color="0.75", linewidth=size / 2)
    ax.plot(x, reached, "s", color=REACHED, markersize=size, label=r"where $\epsilon$ is reached")
    ax.plot(x, delta, "o", color=SET, markersize=size, label=r"$\delta$ as the proof sets it")
    ax.set_ylim(1.15 * delta.min(), 0)
    ax.set_title("Threshold (nats)")
    ax.legend(**BELOW)


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["pruned_mass"]
    first, slack = records.iloc[0], records["threshold_slack_nats"]
    unpruned = int(records["largest_pruned_mass"].isna().sum())
    aside = f"At the right end are the heads without such a row: {unpruned}. " if unpruned else ""
    caption = f"""**Figure A1.** {sweeps.closest(sweeps.head_margins(records))} Appendix A proves that none
reaches it. The heads are of {models.run_name(first)}, with log ε = {first["log_pruning_tolerance"]:g}. Left:
exact attention weight of the pruned blocks in each of {first["measured_rows"]:,} rows of held-out text, by
the dense float64 reference. Only rows with a pruned block count. {aside}The axis is
logarithmic in the exponent. Right: each head's δ, and how far it could be raised on this text before a row
loses ε. On the code's grid that is by {slack.min():.1f} to {slack.max():.1f} nats,
{100 * sweeps.slack_shares(records).median():.0f} % of -δ in the
median head. Only the proof's δ is safe on any text. {style.provenance(records)}"""
    return draw(records), caption


def mass_below_epsilon(pruned_mass: pd.DataFrame) -> Verdict:
    """Met if the largest pruned mass of every head is below epsilon."""
    return sweeps.mass_below(pruned_mass["largest_pruned_mass"], pruned_mass["log_pruning_tolerance"])
