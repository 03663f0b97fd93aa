"""Figure A5: pruned share of each layer, and training loss, against the tokens trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import UnfitRecords
from ..verdict import Verdict, Word
from . import models, training_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SETTLED_PERCENT = 5.0  # a change of training's speed that counts as none
TENTHS = 10  # of a training run, in which its speed is compared
OURS = style.SIZES[0]
LEAST_GAP = 2.8  # points between the names of two layers
BAR_TICKS = 4  # layers whose number stands beside the colour bar


def draw(records: pd.DataFrame, epoch_tokens: int | None = None) -> Figure:
    """Left: pruned share, by layer and of all. Right: training loss with and without ACP.

    Args:
        records: ``training_log`` records of a run with ACP and, if there is one, of its exact pair.
        epoch_tokens: the length of an epoch, whose ends are marked.
    """
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 2.8), layout="constrained")
    _pruned(left, records)
    for n, end in enumerate(epoch_ends(records, epoch_tokens)):
        left.axvline(end, color="0.85", lw=0.8, zorder=0, label="_" if n else "end of an epoch")
        right.axvline(end, color="0.85", lw=0.8, zorder=0)
    figure.legend(loc="outside lower center", ncols=5, columnspacing=1.2)
    _loss(right, records)
    first, last = training_logs.before_change(records), training_logs.paper_tokens(records)
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


def epoch_ends(records: pd.DataFrame, epoch_tokens: int | None) -> list[int]:
    """Tokens after which an epoch ended within the log; none where the length of an epoch is not known."""
    return list(range(epoch_tokens, int(records["tokens"].max()) + 1, epoch_tokens)) if epoch_tokens else []


def _pruned(ax: Axes, records: pd.DataFrame) -> None:
    import seaborn as sns

    shares = training_logs.shares(records)
    colours = dict(zip(shares, sns.color_palette("viridis", len(shares.columns)), strict=True))
    for layer, percent in shares.items():
        ax.plot(shares.index, percent, color=colours[layer], lw=0.7, alpha=0.7)
    low, high = models.PUBLISHED.range("figure2", "pruned_ratio")
    ax.set_ylim(min(10 * np.floor(shares.min(axis=None) / 10), (low + high) / 2 - 10), 101)
    _name_layers(ax, shares, colours)
    mean = training_logs.mean_pruned(records)
    ax.plot(mean["tokens"], mean["percent"], color="0.1", lw=2, label="all layers")
    ax.axhline((low + high) / 2, color=style.PAPER, lw=1, ls="--", label="the paper's 70 %")
    ax.set_title("Attention pruned (%), axis cut")


def _name_layers(ax: Axes, shares: pd.DataFrame, colours: dict) -> None:
    """The number of each layer behind the end of its line, so far apart that they can be read. Where there
    are too many for that, a colour bar does it."""
    ends = shares.iloc[-1].sort_values(ascending=False)
    if len(ends) > np.ptp(ax.get_ylim()) / LEAST_GAP:
        _colour_bar(ax, colours)
        return
    place = np.inf
    for layer, percent in ends.items():
        place = min(percent, place - LEAST_GAP, 100.0)
        ax.annotate(
            f"layer {layer:.0f}",
            (shares.index[-1], percent),
            (1.3 * shares.index[-1], place),
            va="center",
            fontsize=6,
            color=colours[layer],
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": colours[layer], "relpos": (0, 0.5)},
        )


def _colour_bar(ax: Axes, colours: dict) -> None:
    """The colour of each layer, the first on top, where its line is."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    first, last = min(colours), max(colours)
    scale = ScalarMappable(Normalize(first - 0.5, last + 0.5), ListedColormap(list(colours.values())))
    bar = ax.figure.colorbar(scale, ax=ax, ticks=np.linspace(first, last, BAR_TICKS).round(), aspect=30)
    bar.ax.invert_yaxis()
    bar.ax.set_title("layer", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def _loss(ax: Axes, records: pd.DataFrame) -> None:
    points = training_logs.losses(records)
    for name, some in points.groupby(points["log_pruning_tolerance"].isna()):
        style_of = {"color": "0.2", "ls": (0, (4, 2)), "lw": 1} if name else {"color": OURS, "lw": 2}
        ax.plot(some["tokens"], some["loss_nats"], label="exact" if name else "ACP", **style_of)
    seen = points.loc[points["tokens"] >= training_logs.before_change(records), "loss_nats"]
    ax.set_ylim(top=np.quantile(seen, 0.97) * 1.05)
    ax.set_title("Training loss (nats a token), axis cut")
    ax.legend(loc="lower left")


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["training_log"]
    epoch = style.EPOCH_TOKENS.get(found.suite.name)
    return draw(records, epoch), training_logs.caption(records, len(epoch_ends(records, epoch)))


def throughput_settles(training_log: pd.DataFrame) -> Verdict:
    """Met if training with ACP slows down at first and keeps its speed in its second half; short if it slows
    down by little, yet by more than it varies there. Undecided where the logs do not hold the speed, or too
    few points."""
    points = training_log[training_log["layer"].notna()].drop_duplicates("tokens").sort_values("tokens")
    points = points.dropna(subset="throughput_tokens_per_s")
    if len(points) < 2 * TENTHS:
        raise UnfitRecords("no record holds throughput while a model trains")
    tenth = (TENTHS * points["tokens"] / (points["tokens"].max() + 1)).astype(int)
    speed = points["throughput_tokens_per_s"].groupby(tenth).median()
    first, last, late = speed.iloc[0], speed.iloc[-1], speed.iloc[TENTHS // 2 :]
    furthest = 100 * (late / last - 1).abs().max()
    ours = (
        f"{style.count_label(first)} tokens/s in the first tenth, {style.count_label(last)} in the last, "
        f"within {furthest:.1f} % of that from the half on"
    )
    slower = 100 * (first / last - 1)
    short = f"{slower:.1f} % slower than at first, then within {furthest:.1f} %"
    if furthest > SETTLED_PERCENT or slower <= furthest:
        return Verdict(Word.CONTRADICTED, ours, short)
    if slower <= SETTLED_PERCENT:
        return Verdict(
            Word.ANOTHER_SIZE,
            f"{ours} (the first is {slower:.1f} % faster, not over {SETTLED_PERCENT:g} %)",
            short,
        )
    return Verdict(Word.MEASURED, ours, short)
