"""Appendix D: bias and variance of the relaxed gradient against temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from .figure2 import DEFAULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"hard_concrete": "Hard-Concrete", "concrete": "without stretch"}


def draw(records: pd.DataFrame) -> Figure:
    """Relative bias, and relative variance, by temperature: a line a problem.

    Args:
        records: ``estimator`` records.
    """
    from matplotlib import pyplot as plt

    one_each(records, ["relaxation", "swept_temperature", "problem"], "figureD")
    figure, axes = plt.subplots(1, 2, figsize=(style.PAGE_INCHES, 2.3), layout="constrained")
    for colour, (relaxation, label) in zip(style.SIZES, NAMES.items(), strict=False):
        table = records[records["relaxation"] == relaxation]
        for ax, column in zip(axes, ("relative_bias", "relative_variance"), strict=True):
            for number, (_, line) in enumerate(table.groupby("problem")):
                line = line.sort_values("swept_temperature")
                name = label if number == 0 else None
                ax.plot(line["swept_temperature"], line[column], color=colour, lw=0.8, marker=".", label=name)
    for ax, label in zip(axes, ("bias", "variance of a sample"), strict=True):
        ax.axvline(0.66, color=style.PAPER, lw=0.8)
        ax.set(xlabel="temperature $\\beta$", ylabel=f"{label}, relative", yscale="log")
    axes[0].legend()
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["estimator"]
    samples, tokens = records["samples"].max(), records["tokens"].max()
    caption = f"""**Figure D.** At the paper's temperature (grey) {unbiased(records).ours}. Shown is the
gradient through relaxed gates against the exact gradient over all masks of {tokens} tokens, with {samples:,}
samples a point. The bias is its norm over the norm of the exact gradient. The variance is over the square of
that norm. Appendix D calls the estimator unbiased. Its proof is for z that is Bernoulli, which a relaxed z
is not. {style.provenance(records)}"""
    return draw(records), caption


def unbiased(estimator: pd.DataFrame) -> Verdict:
    table = estimator[
        (estimator["relaxation"] == "hard_concrete")
        & (estimator["swept_temperature"] == DEFAULTS["temperature"])
    ]
    ok = table["relative_bias"] <= 3 * table["relative_bias_error"]
    low, high = 100 * table["relative_bias"].min(), 100 * table["relative_bias"].max()
    error = 100 * table["relative_bias_error"].max()
    words = f"the bias is {low:.1f} to {high:.1f} % of the gradient, its standard error at most {error:.2f} %"
    return Verdict.of(ok.all(), words, f"biased by {low:.1f} to {high:.1f} %", n=len(table), unit="problem")
