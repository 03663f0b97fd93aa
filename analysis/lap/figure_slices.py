"""How far from its origin the attribution of a kept vector reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from acp_repro.chain.paper import Claim, Item

from .. import drawing, style
from ..verdict import Status, Verdict
from . import slices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN_WINDOW = 3  # tokens to either side of a vector's origin
OWN_SHARE = 0.5
REACH = 15  # tokens that are drawn


def draw(records: pd.DataFrame) -> Figure:
    """Mean share of positive attribution against the distance from the vector's origin.

    Args:
        records: ``attribution`` records.
    """
    from matplotlib import pyplot as plt

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


def own_slice(attribution: pd.DataFrame) -> Verdict:
    """Met if most attribution of vectors, EOS apart, is near their origin."""
    share = slices.near(slices.positive(attribution), OWN_WINDOW)
    if share is None:
        return Verdict(Status.UNDECIDED, "no vector but EOS has positive attribution")
    return Verdict.of(share >= OWN_SHARE, f"{share:.0%} within {OWN_WINDOW} tokens")


def eos_is_global(attribution: pd.DataFrame) -> Verdict:
    """Met if the attribution of EOS is less concentrated than that of other vectors."""
    found = slices.concentration(slices.positive(attribution))
    if len(found) < 2:
        return Verdict(Status.UNDECIDED, "EOS, or every other vector, has no positive attribution")
    ours = f"on its largest fifth of tokens: EOS {found[True]:.0%}, others {found[False]:.0%}"
    return Verdict.of(found[True] < found[False], ours)


CLAIMS = (
    Claim(
        "Each kept vector stands for the text around it",
        "Section SHAP: each token tends to specialize, attending to a slice of the sentence",
        f"at least {OWN_SHARE:.0%} of the positive attribution of kept vectors, EOS apart, falls on tokens "
        f"within {OWN_WINDOW} places of their origin; written tokens that are not the text's are left out",
        ("attribution",),
        own_slice,
    ),
    Claim(
        "EOS gathers from the whole text",
        "Section SHAP: and the final token, EOS, pulls in the big picture",
        "the attribution of EOS is spread over more of the text than that of other vectors: a smaller share "
        "of it falls on its largest fifth of tokens",
        ("attribution",),
        eos_is_global,
    ),
)

ITEMS = (
    Item(
        "figure_slices",
        "How far from its origin a vector's attribution reaches",
        ("attribution",),
        lambda suite: [suite.main_run],
        claims=CLAIMS,
        ours=True,
    ),
)


if __name__ == "__main__":
    drawing.main(globals())
