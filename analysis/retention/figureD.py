"""Appendix D: bias and variance of the relaxed gradient against temperature."""

from __future__ import annotations

import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from .figure2 import DEFAULTS

NAMES = {"hard_concrete": "Hard-Concrete", "concrete": "without stretch"}


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Relative bias, and relative variance, by temperature: the median and the range of the problems.

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
    usual = records[_usual(records)]
    bias, variance = (
        style.span(usual[name] * scale, form)
        for name, scale, form in (("relative_bias", 100, ".1f"), ("relative_variance", 1, ".2g"))
    )
    axes[0].set_title("Bias")
    axes[1].set_title("Variance of a sample")
    drawing.legend(figure)
    return figure


def _usual(records: pd.DataFrame) -> pd.Series:
    at = records["swept_temperature"] == DEFAULTS["temperature"]
    return (records["relaxation"] == "hard_concrete") & at


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["estimator"]
    samples, tokens = records["samples"].max(), records["tokens"].max()
    caption = f"""**Figure D.** At the paper's temperature {unbiased(records).ours}. Shown is the
gradient through relaxed gates against the exact gradient over all masks of {tokens} tokens, with {samples:,}
samples a point. The bias is its norm over the norm of the exact gradient. The variance is over the square of
that norm. Appendix D calls the estimator unbiased. Its proof is for z that is Bernoulli, which a relaxed z
is not."""
    return draw(records), caption


def unbiased(estimator: pd.DataFrame) -> Verdict:
    table = estimator[_usual(estimator)]
    ok = table["relative_bias"] <= 3 * table["relative_bias_error"]
    low, high = 100 * table["relative_bias"].min(), 100 * table["relative_bias"].max()
    error = 100 * table["relative_bias_error"].max()
    words = f"the bias is {low:.1f} to {high:.1f} % of the gradient, its standard error at most {error:.2f} %"
    return Verdict.of(ok.all(), words, f"biased by {low:.1f} to {high:.1f} %", n=len(table), unit="problem")
