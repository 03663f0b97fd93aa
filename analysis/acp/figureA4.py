"""Figure A4: held-out loss at each position far past the training length, with and without ACP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from acp_repro.chain.paper import Item

from .. import drawing, style
from ..tables import side_by_side
from . import figure3, models, statistics, versions

MEAN_OF = 32  # parts of the longest context; over each the thick line of the difference is a mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(records: pd.DataFrame) -> Figure:
    """The curves, one colour per length evaluated, and below them, larger, ACP minus exact: each window,
    pale, and the mean over a part of the context, which a window's text does not blur.

    Args:
        records: ``long_loss_curve`` records of one setting, with both methods.
    """
    figure = figure3.draw(as_curves(records), heights=(1, 1))
    trained, longest = (records[f"{name}_length_tokens"].max() for name in ("context", "evaluated"))
    for line in figure.axes[1].lines[:-1]:  # the last is the zero
        line.set(alpha=0.3, lw=0.6)
        mean = part_means(*line.get_data(), longest / MEAN_OF)
        figure.axes[1].plot(mean.index, mean, "o-", color=line.get_color(), lw=1.4, markersize=2)
    for ax in figure.axes:
        ax.axvline(trained, color="0.6", lw=0.8, ls=":", zorder=0)
    low, high = figure.axes[0].get_ylim()
    figure.axes[0].set_ylim(top=high + 0.15 * (high - low))  # the words stand over the curves
    figure.axes[0].annotate(
        "trained up to here",
        (trained, 1),
        (3, -8),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=7,
        color="0.35",
    )
    return figure


def as_curves(records: pd.DataFrame) -> pd.DataFrame:
    """``long_loss_curve`` records as ``loss_curve`` records of runs at the lengths evaluated."""
    exact = records["method"] == "exact"
    return records.assign(
        context_length_tokens=records["evaluated_length_tokens"],
        log_pruning_tolerance=records["log_pruning_tolerance"].mask(exact),
    )


def part_means(position: np.ndarray, value: np.ndarray, tokens: float) -> pd.Series:
    """Means of ``value`` over parts of so many ``tokens``, by the middle of each part."""
    part = position // tokens
    return pd.Series(value).groupby((part + 0.5) * tokens).mean()


def segments(records: pd.DataFrame) -> pd.DataFrame:
    """Mean loss of each method within the training length and past it, at the longest length evaluated.

    Returns:
        one row per segment: ``segment`` in words, ``acp`` and ``exact`` in nats.

    Raises:
        UnfitRecords: a method lacks a position, or has two records of one.
    """
    longest = records[records["evaluated_length_tokens"] == records["evaluated_length_tokens"].max()]
    keys = ["context_length_tokens", "position"]
    both = side_by_side(longest, keys, "method", "loss_nats", statistics.METHODS, "long_loss_curve")
    times = both["position"] // both["context_length_tokens"]
    within = times.map(
        lambda n: "within the training length" if n == 0 else "up to twice it" if n == 1 else "past that"
    )
    return both.groupby(within.rename("segment"), sort=False)[list(statistics.METHODS)].mean().reset_index()


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["long_loss_curve"]
    first = records.iloc[0]
    trained = style.length_label(first["context_length_tokens"])
    runs = records.groupby("method")["run"].first()
    alone = runs["acp"] == runs["exact"]
    pair = "the same weights computed exactly" if alone else f"{runs['exact']}, trained apart"
    numbers = ". ".join(
        f"{row.segment.capitalize()}: {row.acp:.3f} with ACP and {row.exact:.3f} without"
        for row in segments(records).itertuples()
    )
    differences = statistics.loss_differences(as_curves(records))
    gaps = statistics.largest_gaps(differences)
    longest = differences["context_length_tokens"].max()
    beyond = differences["position"] >= first["context_length_tokens"]
    past = differences.loc[(differences["context_length_tokens"] == longest) & beyond, "difference"].mean()
    largest = "; ".join(
        f"{style.length_label(row.context_length_tokens)}: {row.gap_nats:.4f} at {row.position}"
        for row in gaps.itertuples()
    )
    unlike = versions.notes(versions.unlike(records, figure3.PAIR), after=".")
    caption = f"""**Figure A4.** Past the training length of {trained} tokens (dotted) ACP and exact differ by
{past:+.4f} nats in mean loss. The text is held-out documents, as far as they are long enough for contexts of
two and four times that. The model is {models.ARCHITECTURES[first["architecture"]]}: {runs["acp"]} (wide,
pale) and {pair} (dashed){unlike[:1]}. Below is their difference: pale for windows of {first["window_tokens"]}
positions, thick for means over 1/{MEAN_OF} of the longest context. {unlike} All lengths read the same
{first["measured_tokens"]:,} tokens. δ follows the length evaluated. Mean losses are in nats. {numbers}.
Largest absolute difference: {largest}. {style.provenance(records)}"""
    return draw(records), caption


ITEMS = (
    Item(
        "figureA4",
        "Loss at each position far past the training length",
        ("long_loss_curve",),
        lambda suite: suite.needle_runs("pro", longest=True),
        "FoX (Pro) with ACP",
        ours=True,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
