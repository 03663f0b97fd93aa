"""Appendix E: variance of the gradient against the number of samples."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from .. import drawing, style
from ..verdict import Verdict

SLOPE_WITHIN = 0.05


def slope(records: pd.DataFrame) -> float:
    """The slope of log variance against log B, by least squares."""
    return float(np.polyfit(np.log(records["batch_samples"]), np.log(records["gradient_variance"]), 1)[0])


def draw(records: pd.DataFrame) -> drawing.Figure:
    """Measured variances, and C/B with C from the first measurement, from ``variance`` records."""
    table = records.sort_values("batch_samples")
    first = table["gradient_variance"].iloc[0] * table["batch_samples"].iloc[0]
    figure, ax = drawing.panels()
    ax.plot(
        table["batch_samples"], first / table["batch_samples"], color=style.PAPER, label="C / B, slope −1"
    )
    ax.plot(table["batch_samples"], table["gradient_variance"], "o", label="measured")
    ax.set(xscale="log", yscale="log", xlabel="samples B", ylabel="variance of the mean gradient")
    ax.legend()
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["variance"]
    caption = f"""**Figure E.** The variance of a mean of B gradients through relaxed gates has a slope of
{slope(records):.3f} on logarithmic axes. Appendix E bounds the variance by C/B, a slope of -1. Each point
is the variance over {records["repeats"].max():,} repeats."""
    return draw(records), caption


def variance_falls(variance: pd.DataFrame) -> Verdict:
    found = slope(variance)
    return Verdict.of(
        math.isclose(found, -1, abs_tol=SLOPE_WITHIN),
        f"slope {found:.3f}",
        n=variance["batch_samples"].nunique(),
        unit="batch size",
    )
