"""How far from its origin the attribution of a kept vector reaches."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from acp_repro.papers.lap.claims import OWN_WINDOW

from .. import drawing, style
from . import slices

REACH = 15  # tokens that are drawn


def draw(records: pd.DataFrame) -> Figure:
    """Mean share of positive attribution against the distance from the vector's origin.

    Args:
        records: ``attribution`` records.
    """
    shares = slices.by_distance(slices.positive(records))
    figure, ax = plt.subplots(figsize=(style.COLUMN_INCHES, 2.1), layout="constrained")
    ax.axvspan(-OWN_WINDOW - 0.5, OWN_WINDOW + 0.5, color="0.93", lw=0)
    for eos, colour, label in ((False, "#0072B2", "kept vectors"), (True, "#E69F00", "EOS")):
        curve = shares[shares["is_eos"] == eos]
        curve = curve[curve["distance"].abs() <= REACH]
        ax.plot(curve["distance"], 100 * curve["share"], color=colour, lw=1.2, marker=".", ms=4, label=label)
    ax.set(
        xlim=(-REACH, REACH),
        ylim=(0, None),
        xlabel="written token − origin of the vector (tokens)",
        ylabel="share of attribution (%)",
    )
    ax.legend()
    return figure


def make(found: drawing.Found) -> tuple[Figure, str]:
    records = found.records["attribution"]
    table = slices.positive(records)
    share = slices.near(table, OWN_WINDOW)
    near = "no vector but EOS has any" if share is None else f"{100 * share:.0f} % of that of all but EOS"
    texts = records.groupby("run")["text"].nunique().sum()
    caption = f"""**Slices.** Where the positive SHAP values of a kept vector lie, by distance from the token
that it was; {texts} held-out texts, and of what is written those tokens that stand at their place. Within
{OWN_WINDOW} tokens (grey): {near}.
{style.provenance(records)}"""
    return draw(records), caption


if __name__ == "__main__":
    drawing.main(globals())
