"""Appendix D: bias and variance of the relaxed gradient against temperature."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from .. import drawing, style
from ..tables import one_each

NAMES = {"hard_concrete": "Hard-Concrete", "concrete": "without stretch"}


def draw(records: pd.DataFrame) -> Figure:
    """Relative bias, and relative variance, by temperature: a line a problem.

    Args:
        records: ``estimator`` records.
    """
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
    caption = f"""**Figure D.** The gradient through relaxed gates against the exact gradient over all masks
of {tokens} tokens, {samples:,} samples a point: norm of the bias over the norm of the exact gradient, and
variance over its square. Appendix D calls the estimator unbiased, proved for z that is Bernoulli, which a
relaxed z is not. Grey: the paper's temperature. {style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
