"""Figure A5: pruned share of each layer, and training loss, against the tokens trained."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import drawing, style
from ..tables import one_each
from . import models, training_logs

OURS = style.SIZES[0]


def draw(records: pd.DataFrame) -> Figure:
    """Left: pruned share, by layer and of all. Right: training loss with and without ACP.

    Args:
        records: ``training_log`` records of a run with ACP and, if there is one, of its exact pair.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 2.8), layout="constrained")
    _pruned(left, records)
    figure.legend(loc="outside lower center", ncols=5, columnspacing=1.2)
    _loss(right, records)
    first, last = records["tokens"].min(), training_logs.paper_tokens(records)
    for ax in (left, right):
        ax.axvline(last, color=style.PAPER, lw=0.8, ls=":", zorder=0)
        ax.set_xscale("log")
        ax.set_xlim(first, 1.4 * max(last, records["tokens"].max()))
        ax.set_xlabel("tokens trained")
        ax.xaxis.set_major_formatter(lambda x, _: style.count_label(x))
        ax.minorticks_off()
    right.annotate(
        f"the paper's {style.count_label(last)}",
        (last, 1),
        (-3, -8),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        fontsize=7,
        color="0.35",
    )
    return figure


def _pruned(ax: Axes, records: pd.DataFrame) -> None:
    layers = records[records["layer"].notna()]
    one_each(layers, ["run", "step", "layer"], "training_log")
    shares = layers.assign(percent=100 * layers["pruned_ratio"])
    colours = sns.color_palette("viridis", shares["layer"].nunique())
    for colour, (layer, some) in zip(colours, shares.groupby("layer"), strict=True):
        end = shares["layer"].max()
        label = {0: "first layer", end: "last layer"}.get(layer, "_")
        ax.plot(some["tokens"], some["percent"], color=colour, lw=0.7, alpha=0.7, label=label)
    mean = training_logs.mean_pruned(records)
    ax.plot(mean["tokens"], mean["percent"], color="0.1", lw=2, label="all layers")
    line = training_logs.extrapolation(mean, training_logs.paper_tokens(records))
    if line is not None:
        ax.plot(*line, color="0.1", lw=1, ls=(0, (3, 2)), label="extrapolated, not measured")
    low, high = models.PUBLISHED.range("figure2", "pruned_ratio")
    ax.axhline((low + high) / 2, color=style.PAPER, lw=1, ls="--", label="the paper's 70 %")
    ax.set_ylim(0, 100)
    ax.set_title("Attention pruned (%)")


def _loss(ax: Axes, records: pd.DataFrame) -> None:
    points = training_logs.losses(records)
    for name, some in points.groupby(points["log_pruning_tolerance"].isna()):
        style_of = {"color": "0.2", "ls": (0, (4, 2)), "lw": 1} if name else {"color": OURS, "lw": 2}
        ax.plot(some["tokens"], some["loss_nats"], label="exact" if name else "ACP", **style_of)
    ax.set_ylim(top=np.quantile(points["loss_nats"], 0.97) * 1.05)
    ax.set_title("Training loss (nats a token)")
    ax.legend(loc="lower left")


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["training_log"]
    return draw(records), training_logs.caption(records)


if __name__ == "__main__":
    drawing.main(globals())
