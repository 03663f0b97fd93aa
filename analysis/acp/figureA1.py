"""Figure A1: the attention weight that every head really loses, beside the bound of Appendix A."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict
from . import naming, sweeps


def draw(records: pd.DataFrame) -> drawing.Figure:
    """The most that a row loses: the heads from the one that loses most to the one that loses least.

    Args:
        records: ``pruned_mass`` records of one run.
    """
    one_each(records, ["run", "layer", "head"], "pruned_mass")
    mass = records["largest_pruned_mass"].dropna().sort_values(ascending=False)
    # A weight that float64 cannot tell from 0 stands at the smallest number that it can.
    digits = -np.log10(mass.clip(lower=np.finfo(float).smallest_subnormal))
    bound = -records["log_pruning_tolerance"].iloc[0] / np.log(10)
    figure, ax = drawing.panels(height=2.5)
    ax.axhspan(1, bound, color="0.9", lw=0, label=r"excluded by the proof: $\epsilon$ or more")
    ax.axhline(bound, color="0.25", lw=1)
    drawing.note(ax, f"ε = {sweeps.power_of_ten(10**-bound)}", (99, bound), (-1, 1))
    # The exponents fill orders of magnitude themselves, so the axis is logarithmic in them.
    ax.plot(100 * (np.arange(len(mass)) + 0.5) / len(records), digits, color=style.SIZES[0], lw=2)
    for at, name in ((0, "most"), (len(records) // 2, "median head")):
        if at >= len(mass):
            continue
        place = (100 * (at + 0.5) / len(records), digits.iloc[at])
        ax.plot(*place, "o", color=style.SIZES[0])
        drawing.note(ax, f"{name}: {sweeps.power_of_ten(10 ** -place[1])}", place, (5, 6))
    ax.set_yscale("log")
    ax.set_ylim(max(30.0, 1.3 * digits.max() if len(mass) else 0), 2.5)
    ticks = [t for t in (3, 5, 10, 20, 50, 100, 200, 300) if t < ax.get_ylim()[0]]
    ax.set_yticks(ticks, [sweeps.power_of_ten(10.0**-t) for t in ticks])
    ax.minorticks_off()
    ax.set(
        xlim=(0, 100),
        xlabel="heads (%), from the one that loses most",
        ylabel="attention weight lost (log of log)",
    )
    drawing.legend(figure)
    return figure


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["pruned_mass"]
    first, slack = records.iloc[0], records["threshold_slack_nats"]
    unpruned = int(records["largest_pruned_mass"].isna().sum())
    aside = f"The heads without such a row are left out: {unpruned}. " if unpruned else ""
    caption = f"""**Figure A1.** {sweeps.closest(sweeps.head_margins(records))} Appendix A proves that none
reaches it. The heads are of {naming.run_name(first)}, with log ε = {first["log_pruning_tolerance"]:g}. Shown
is the exact attention weight of the pruned blocks, the most of {first["measured_rows"]:,} rows of held-out
text, by the dense float64 reference. Only rows with a pruned block count. {aside}The axis is logarithmic in
the exponent. Each head's δ could be raised on this text before a row loses ε, on the code's grid by
{slack.min():.1f} to {slack.max():.1f} nats, {100 * sweeps.slack_shares(records).median():.0f} % of -δ in the
median head. Only the proof's δ is safe on any text."""
    return draw(records), caption


def mass_below_epsilon(pruned_mass: pd.DataFrame) -> Verdict:
    """Met if the largest pruned mass of every head is below epsilon."""
    return sweeps.mass_below(pruned_mass["largest_pruned_mass"], pruned_mass["log_pruning_tolerance"])
