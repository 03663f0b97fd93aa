"""Figure A1: the largest attention weight that a row of each head loses, and the bound of Appendix A."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import naming, sweeps


def draw(records: pd.DataFrame) -> drawing.Figure:
    """The largest pruned mass of each head, in descending order.

    Args:
        records: ``pruned_mass`` records of one run.
    """
    one_each(records, ["run", "layer", "head"], "pruned_mass")
    mass = records["largest_pruned_mass"].dropna().sort_values(ascending=False)
    # A mass that underflows float64 is drawn at the smallest positive float64.
    digits = -np.log10(mass.clip(lower=np.finfo(float).smallest_subnormal))
    bound = -records["log_pruning_tolerance"].iloc[0] / np.log(10)
    figure, ax = drawing.panels(height=2.5)
    ax.axhspan(1, bound, color="0.9", lw=0, label=r"excluded by Appendix A: $\epsilon$ or more")
    ax.axhline(bound, color="0.25", lw=1)
    drawing.note(ax, f"ε = {sweeps.power_of_ten(10**-bound)}", (99, bound), (-1, 1))
    # The exponents span orders of magnitude, so the axis is logarithmic in the exponent.
    places = 100 * (np.arange(len(mass)) + 0.5) / len(records)
    ax.plot(places, digits, color=style.ROLES["acp"], lw=2)
    for at, name in ((0, "largest"), (len(records) // 2, "median head")):
        if at >= len(mass):
            continue
        place = (places[at], digits.iloc[at])
        ax.plot(*place, "o", color=style.ROLES["acp"], clip_on=False)
        drawing.note(ax, f"{name}: {sweeps.power_of_ten(10 ** -place[1])}", place, (5, 6))
    ax.set_yscale("log")
    ax.set_ylim(max(30.0, 1.3 * digits.max() if len(mass) else 0), 2.5)
    ticks = [t for t in (3, 5, 10, 20, 50, 100, 200, 300) if t < ax.get_ylim()[0]]
    ax.set_yticks(ticks, [sweeps.power_of_ten(10.0**-t) for t in ticks])
    ax.minorticks_off()
    ax.set(
        xlim=(0, 100),
        xlabel="heads (%), in descending order of the lost weight",
        ylabel="attention weight lost (log of log)",
    )
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_mass"]
    first, slack = records.iloc[0], records["threshold_slack_nats"]
    unpruned = int(records["largest_pruned_mass"].isna().sum())
    aside = f"The {unpruned} heads without a pruned block are not drawn. " if unpruned else ""
    caption = f"""{naming.heading(context.item)} {sweeps.closest(sweeps.head_margins(records))} Appendix A
proves that every row loses less than ε. The heads are those of {naming.run_name(first)}, with log ε =
{first["log_pruning_tolerance"]:g}. The curve shows the exact attention weight of the pruned blocks, the
maximum over {first["measured_rows"]:,} rows of held-out text, by the dense float64 reference. Only rows with
a pruned block count. {aside}The vertical axis is logarithmic in the exponent. On this text and on the
kernels' grid, each head's δ could rise by {slack.min():.1f} to {slack.max():.1f} nats before a row loses ε.
For the median head, this is {100 * sweeps.slack_shares(records).median():.0f} % of −δ. Only the proved δ is
safe on any text."""
    return draw(records), caption


def mass_below_epsilon(pruned_mass: pd.DataFrame) -> Verdict:
    """Reproduced if the largest pruned mass of every head is below epsilon."""
    return sweeps.mass_below(pruned_mass["largest_pruned_mass"], pruned_mass["log_pruning_tolerance"])
