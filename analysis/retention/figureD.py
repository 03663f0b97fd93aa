"""Appendix D: bias and variance of the relaxed gradient against temperature."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from .figure2 import DEFAULTS

NAMES = {"hard_concrete": "Hard-Concrete", "concrete": "without stretch"}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Relative bias and relative variance by temperature: the median and the range over problems.

    Args:
        records: ``estimator`` records.
    """
    one_each(records, ["relaxation", "swept_temperature", "problem"], "figureD")
    figure, axes = drawing.panels(2, 2.4)
    columns = {"relative_bias": "bias, relative", "relative_variance": "variance of a sample, relative"}
    for ax, (column, label) in zip(axes, columns.items(), strict=True):
        for colour, (relaxation, name) in zip(style.SIZES, NAMES.items(), strict=False):
            table = records[records["relaxation"] == relaxation]
            by_problem = table.pivot(index="swept_temperature", columns="problem", values=column)
            x = by_problem.index
            ax.fill_between(x, by_problem.min(axis=1), by_problem.max(axis=1), color=colour, alpha=0.2, lw=0)
            ax.plot(x, by_problem.median(axis=1), "o-", color=colour, label=f"{name}, median and range")
        ax.axvline(DEFAULTS["temperature"], color="0.4", lw=1, ls="--", label="the paper's temperature")
        ax.set(xlabel="temperature $\\beta$", ylabel=label, yscale="log")
    axes[0].set_title("Bias")
    axes[1].set_title("Variance of a sample")
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["estimator"]
    samples, tokens = records["samples"].max(), records["tokens"].max()
    caption = f"""**Figure D.** At the paper's temperature, {unbiased(records).ours}. The figure compares
the gradient through relaxed gates with the exact gradient over all masks of {tokens} tokens, with
{samples:,} samples per point. (a) The norm of the bias, divided by the norm of the exact gradient. (b) The
variance of a sample, divided by the square of that norm. Appendix D calls the estimator unbiased. The proof
assumes that z is Bernoulli, and a relaxed z is not."""
    return draw(records), caption


def unbiased(estimator: pd.DataFrame) -> Verdict:
    usual = estimator["swept_temperature"] == DEFAULTS["temperature"]
    table = estimator[usual & (estimator["relaxation"] == "hard_concrete")]
    ok = table["relative_bias"] <= 3 * table["relative_bias_error"]
    low, high = 100 * table["relative_bias"].min(), 100 * table["relative_bias"].max()
    short = f"the bias is {low:.1f} to {high:.1f} % of the exact gradient"
    words = f"{short}, with a standard error of at most {100 * table['relative_bias_error'].max():.2f} %"
    return Verdict.of(ok.all(), words, short, n=len(table), unit="problem")
