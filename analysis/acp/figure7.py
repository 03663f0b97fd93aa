"""Figure 7: what epsilon does to savings and loss, and how far the pruned mass stays under it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import drawing, style
from ..tables import one_each
from . import sweeps

DEFAULT = -10  # Section 3: epsilon = e^-10 throughout
BLOCKS, ENTRIES = style.SIZES[:2]
# Legends lie over the dotted line, so that it does not cross words.
OPAQUE = {"frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 1}


def draw(records: pd.DataFrame) -> Figure:
    """Left: savings by blocks and entry by entry, with the loss. Right: pruned mass and its bound.

    Args:
        records: ``epsilon_sweep`` records of one run.
    """
    records = one_each(records, ["swept_log_pruning_tolerance"], "epsilon_sweep")
    records = records.sort_values("swept_log_pruning_tolerance")
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(style.PAGE_INCHES, 2.4), layout="constrained", width_ratios=(1.2, 1)
    )
    for ax in (left, right):
        values = records["swept_log_pruning_tolerance"]
        if DEFAULT in set(values):
            ax.axvline(DEFAULT, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        ax.set_xticks(values, [f"−{-v:g}" + "\n(default)" * (v == DEFAULT) for v in values])
        ax.set_xlabel(r"$\log\,\epsilon$", labelpad=-5)
    _savings(left, records)
    _mass(right, records)
    return figure


def _savings(ax: Axes, records: pd.DataFrame) -> None:
    x = records["swept_log_pruning_tolerance"]
    for column, color, line, label in (
        ("token_pruned_ratio", ENTRIES, "s--", "entry by entry, what no grid can exceed"),
        ("block_pruned_ratio", BLOCKS, "o-", "in the code's blocks, with the loss in nats"),
    ):
        ax.plot(x, 100 * records[column], line, color=color, markersize=4, label=label)
    for row in records.itertuples():
        point = row.swept_log_pruning_tolerance, 100 * row.block_pruned_ratio
        ax.annotate(
            f"{row.loss_nats:.3f}",
            point,
            (0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=6.2,
            bbox=sweeps.CLEAR,
            zorder=1.5,
        )
    ax.set_ylim(0, 104)
    ax.set_title("Attention pruned (%)")
    ax.legend(loc="best", **OPAQUE)


def _mass(ax: Axes, records: pd.DataFrame) -> None:
    x, mass = records["swept_log_pruning_tolerance"], records["largest_pruned_mass"]
    bound = np.exp(x)
    ax.fill_between(x, bound, 1, color="0.92", linewidth=0)
    ax.plot(x, bound, "-", color="0.25", label=r"$\epsilon$, the bound of Appendix A")
    ax.plot(x, mass, "o-", color=BLOCKS, markersize=4, label="measured, the largest of all rows")
    for value, high, low in zip(x, bound, mass, strict=True):
        if value == DEFAULT and np.isfinite(low):
            ax.annotate(
                "",
                (value, high),
                (value, low),
                arrowprops={"arrowstyle": "<->", "color": "0.35", "lw": 0.8, "shrinkA": 3, "shrinkB": 1},
            )
            ax.annotate(
                f"{sweeps.power_of_ten(high / low)}×",
                (value, high**0.6 * low**0.4),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
    ax.set_yscale("log")
    ax.set_ylim(ax.get_ylim()[0] * 1e-5, 1)  # the legend's room
    ax.set_title("Attention weight that a row loses")
    ax.legend(loc="lower right", **OPAQUE)


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["epsilon_sweep"]
    spread = records["loss_nats"].max() - records["loss_nats"].min()
    losses = f"differ by {spread:.1g} nats at most" if spread else "are identical"
    first = records.iloc[0]
    caption = f"""**Figure 7.** What ε does in one model: {first["run"]}, trained with log ε =
{first["log_pruning_tolerance"]:g}, on {first["measured_tokens"]:,} held-out tokens in sequences of
{first["context_length_tokens"]:,}. Left: share of the attention that is pruned, on the code's grid of
blocks and entry by entry; the validation losses {losses}. Right: the largest
attention weight that any row of any head loses to pruned blocks, by the dense float64 reference. The bound
of Appendix A excludes the grey region. {sweeps.closest(sweeps.bound_margins(records))} Dotted: the paper's
default, log ε = {DEFAULT}. {style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
