"""Figure 2: scores against temperature and stretch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.chain.paper import Claim, Item
from acp_repro.common.statistics import share_error

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLATEAU_POINTS = 2.0
DEFAULTS = {"temperature": 0.66, "stretch_low": -0.1, "stretch_high": 1.1}
TITLES = {
    "temperature": "temperature $\\beta$",
    "stretch_low": "stretch $\\gamma$",
    "stretch_high": "stretch $\\zeta$",
}


def swept(records: pd.DataFrame, name: str) -> pd.DataFrame:
    """The first score on the test split of the runs that differ from the default in ``name`` alone."""
    test = records[records["split"] == "test"]
    for other, value in DEFAULTS.items():
        if other != name:
            test = test[test[other] == value]
    test = test[test["metric"] == test.groupby("dataset")["metric"].transform("first")]
    key = ["dataset", "backbone", "budget", "gates", name]
    return one_each(test, key, "figure2").sort_values(name)


def draw(records: pd.DataFrame) -> Figure:
    """A panel for each setting, a line for each task and budget.

    Args:
        records: ``score`` records of one seed.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(style.PAGE_INCHES, 2.2), layout="constrained", sharey=True)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        table = swept(records, name)
        for (dataset, _, budget, _), line in table.groupby(["dataset", "backbone", "budget", "gates"]):
            ax.plot(line[name], line["score_percent"], "o-", label=f"{dataset}, {100 * budget:g} %")
            default = line[line[name] == DEFAULTS[name]]
            ax.plot(default[name], default["score_percent"], "x", color="0.1", ms=8, zorder=3)
        ax.set(xlabel=title)
    axes[0].set_ylabel("test score (%)")
    axes[0].legend()
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["score"]
    caption = f"""**Figure 2.** Test score of Adaptive Retention against the relaxation's three settings,
one moved at a time, one training run a point; a cross marks the paper's default. The stretch, gamma and
zeta of Eq. 6, is what the paper's figure calls threshold.
{style.provenance(records)}"""
    return draw(records), caption


def plateau(score: pd.DataFrame) -> Verdict:
    words, margins, spread = [], [], []
    for name in DEFAULTS:
        table = swept(score, name)
        for (task, _, budget, gates), line in table.groupby(["dataset", "backbone", "budget", "gates"]):
            default = line[line[name] == DEFAULTS[name]]["score_percent"]
            if len(line) < 2 or default.empty:
                continue
            off = (line["score_percent"] - default.iloc[0]).abs().max()
            # Two models on the same examples, each with the error of a share.
            of_one = share_error(default.iloc[0] / 100, line["measured_examples"].max())
            spread.append(100 * 2**0.5 * of_one)
            margins.append(PLATEAU_POINTS - off)
            place = f"{task}, {gates.replace('_', ' ')}, {100 * budget:g} %"
            words.append(f"{name.replace('_', ' ')} ({place}): {off:.1f} ± {spread[-1]:.1f} points")
    if not words:
        return Verdict.of(None, "nothing is swept")
    return Verdict.of(errors.shown(margins, spread), "; ".join(words))


CLAIMS = (
    Claim(
        "Scores are robust to temperature and stretch",
        "Section Limitations, (iv): we observe robustness plateaus",
        f"every value swept scores within {PLATEAU_POINTS:g} points of the default, {errors.IN_WORDS}",
        ("score",),
        plateau,
    ),
)

ITEMS = (
    Item(
        "figure2",
        "Temperature and stretch",
        ("score",),
        lambda suite: suite.sweeps(),
        "Adaptive Retention at several temperatures or stretches",
        CLAIMS,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
