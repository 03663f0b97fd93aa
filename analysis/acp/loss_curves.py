"""Held-out loss at each position with and without ACP: what Figures 3, 8 and 11 share."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .. import drawing, style
from . import models, statistics

ACP, EXACT = {"lw": 2.2, "alpha": 0.45}, {"lw": 0.9, "ls": (0, (4, 2))}


def draw(records: pd.DataFrame) -> Figure:
    """One column per size: the curves, one colour per context length, and below them ACP minus exact.

    Args:
        records: ``loss_curve`` records of runs with ACP and of their exact pairs.

    Raises:
        UnfitRecords: a run lacks its pair.
    """
    curves = statistics.loss_differences(records)
    sizes = list(dict.fromkeys(curves["size"]))
    lengths = sorted(curves["context_length_tokens"].unique())
    colours = dict(zip(lengths, sns.color_palette("viridis", len(lengths) + 1), strict=False))
    width = min(style.PAGE_INCHES, style.COLUMN_INCHES * len(sizes))
    figure, axes = plt.subplots(
        2,
        len(sizes),
        figsize=(width, 3.2),
        sharex="col",
        sharey="row",
        squeeze=False,
        height_ratios=(3, 1.3),
        layout="constrained",
    )
    for (top, bottom), size in zip(axes.T, sizes, strict=True):
        _column(top, bottom, curves[curves["size"] == size], colours)
        top.set_title(models.in_words([size]))
    widest = max(1.1 * curves["difference"].abs().max(), 1e-4)  # rounding alone is no curve
    axes[1, 0].set_ylim(-widest, widest)
    axes[0, 0].set_ylabel("loss (nats)")
    axes[1, 0].set_ylabel("ACP − exact")
    handles = [Line2D([], [], color=c, lw=2, label=style.length_label(n)) for n, c in colours.items()]
    handles[0].set_label(f"$L$ = {handles[0].get_label()}")
    for label, line in (("ACP", ACP), ("exact", EXACT)):
        handles.append(Line2D([], [], color="0.3", label=label, **line))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        handlelength=1.5,
        columnspacing=1.2,
        handletextpad=0.5,
    )
    return figure


def _column(top: Axes, bottom: Axes, curves: pd.DataFrame, colours: dict) -> None:
    for (length, _), curve in curves.groupby(["context_length_tokens", "seed"]):
        top.plot(curve["position"], curve["acp"], color=colours[length], **ACP)
        top.plot(curve["position"], curve["exact"], color=colours[length], **EXACT)
        bottom.plot(curve["position"], curve["difference"], color=colours[length], lw=0.9)
    bottom.axhline(0, color="0.6", lw=0.6, zorder=0)
    style.token_axis(top.xaxis, int(curves["context_length_tokens"].max()))
    bottom.set_xlabel("token position")
    # The largest gap of each pair, in the colour of its length, over the differences.
    gaps = statistics.largest_gaps(curves).sort_values("seed").groupby("context_length_tokens")["gap_nats"]
    labels = {n: " / ".join(f"{gap:.4f}" if gap else "none" for gap in of_length) for n, of_length in gaps}
    bottom.legend(
        handles=[Line2D([], [], alpha=0, label=label) for label in ("largest gap:", *labels.values())],
        labelcolor=["0.3", *(colours[length] for length in labels)],
        loc="lower left",
        bbox_to_anchor=(0.02, 0.97),
        ncols=len(labels) + 1,
        handlelength=0,
        handletextpad=0,
        columnspacing=1.0,
        borderpad=0,
        borderaxespad=0,
    )


def gaps_in_words(differences: pd.DataFrame) -> str:
    """The largest gap of each pair of curves of :func:`statistics.loss_differences`, and where it is."""
    gaps = statistics.largest_gaps(differences)
    return "; ".join(
        f"{size}, {style.length_label(length)}: "
        + ", ".join(
            (f"{row.gap_nats:.4f} at {row.position}" if row.gap_nats else "none, they are identical")
            + (f" (seed {row.seed})" if len(pairs) > 1 else "")
            for row in pairs.itertuples()
        )
        for (size, length), pairs in gaps.groupby(["size", "context_length_tokens"], sort=False)
    )


def make(found: drawing.Found, item: str, architecture: str) -> tuple[Figure, str]:
    """The figure and its caption; ``item`` is its number in the paper."""
    name, records = models.ARCHITECTURES[architecture], found.records["loss_curve"]
    numbers = gaps_in_words(statistics.loss_differences(records))
    noise = statistics.seed_gap(records)
    noise = "" if noise is None else f" Two seeds of one setting differ by up to {noise:.3f}."
    tokens, windows = (
        ", ".join(f"{n:,}" for n in records[column].unique())
        for column in ("measured_tokens", "window_tokens")
    )
    caption = f"""**Figure {item}.** Held-out loss at each position of the context for {name},
trained and evaluated with ACP (wide, pale) and without (dashed), by context length $L$; below, their
difference. Each point is the mean over a window of {windows} positions centred there, whole windows
only, of {tokens} held-out tokens, the same text at every context length. Paired runs differ in
that one setting and are trained apart; each pair is drawn. Largest absolute difference of a pair in nats, and
where: {numbers}.{noise}
{style.provenance(records)}"""
    return draw(records), caption
