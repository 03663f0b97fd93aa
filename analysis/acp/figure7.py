"""Figure 7: pruned ratio, loss and largest pruned mass as functions of epsilon."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from .. import drawing, style
from ..tables import one_each
from ..verdict import Verdict, Word
from . import naming, sweeps

DEFAULT = -10  # Section 3: epsilon = e^-10 throughout
SAME_LOSS_NATS = 0.001  # the margin for the losses of one model at two epsilons
LEAST_POINTS = 4.0  # the least range of the pruned ratio's axis, which keeps a negligible change small


def draw(records: pd.DataFrame) -> drawing.Figure:
    """(a) The pruned ratio of blocks and of tokens, with the loss; (b) the pruned mass and its bound.

    Args:
        records: ``epsilon_sweep`` records of one run.
    """
    records = one_each(records, ["swept_log_pruning_tolerance"], "epsilon_sweep")
    records = records.sort_values("swept_log_pruning_tolerance")
    figure, (left, right) = drawing.panels(2, 2.8, width_ratios=(1.2, 1))
    values = records["swept_log_pruning_tolerance"]
    for ax in (left, right):
        ax.set_xticks(values, [f"−{-v:g}" + "\n(default)" * (v == DEFAULT) for v in values])
        ax.set_xlabel(r"$\log\,\epsilon$", labelpad=-5)
    _savings(left, records)
    _mass(right, records)
    return figure


def _savings(ax: drawing.Axes, records: pd.DataFrame) -> None:
    x = records["swept_log_pruning_tolerance"]
    ratios = 100 * records[["token_pruned_ratio", "block_pruned_ratio"]]
    look = {"color": style.ROLES["acp"], "clip_on": False}
    ax.plot(x, ratios["token_pruned_ratio"], "s--", mfc="white", **look)
    ax.plot(x, ratios["block_pruned_ratio"], "o-", **look)
    low, high = ratios.min(axis=None), ratios.max(axis=None)
    span = max(high - low, LEAST_POINTS)
    ax.set_ylim(max(-0.1 * span, low - 0.5 * span), high + 0.25 * span)
    ax.set_ylabel("attention pruned (%)" + ", axis cut" * bool(ax.get_ylim()[0] > 0))
    for words, end in (
        ("tokens: the limit of any block size", ratios["token_pruned_ratio"].iloc[-1]),
        ("blocks of the kernels", ratios["block_pruned_ratio"].iloc[-1]),
    ):
        drawing.note(ax, words, (x.iloc[-1], end), (0, 4), ha="right")
    for tolerance, ratio, loss in zip(x, ratios["block_pruned_ratio"], records["loss_nats"], strict=True):
        drawing.note(ax, f"{loss:.4f}", (tolerance, ratio), (0, -4), fontsize=7, rotation=90)
    ax.set_title("Pruned ratio, with the loss (nats) at each point")


def _mass(ax: drawing.Axes, records: pd.DataFrame) -> None:
    x, mass = records["swept_log_pruning_tolerance"], records["largest_pruned_mass"]
    bound = np.exp(x)
    ax.fill_between(x, bound, 1, color="0.92", linewidth=0)
    ax.plot(x, bound, "-", color="0.25")
    ax.plot(x, mass, "o-", color=style.ROLES["acp"])
    ax.set(yscale="log", ylabel="attention weight that a row loses")
    ax.set_ylim(top=1)
    ax.text(0.05, 0.95, r"excluded: $\epsilon$ or more", transform=ax.transAxes, va="top")
    ax.text(0.97, 0.05, "measured maximum", transform=ax.transAxes, ha="right", color=style.ROLES["acp"])
    ax.set_title("Largest pruned mass of a row")


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["epsilon_sweep"]
    table = records.sort_values("swept_log_pruning_tolerance")
    spread = records["loss_nats"].max() - records["loss_nats"].min()
    losses = f"differ by at most {spread:.1g} nats" if spread else "are identical"
    first, (low, high) = records.iloc[0], table["swept_log_pruning_tolerance"].iloc[[0, -1]]
    least, most = 100 * table["block_pruned_ratio"].iloc[[0, -1]]
    caption = f"""{naming.heading(context.item)} From log ε = {low:g} to {high:g}, the pruned ratio grows from
{least:.1f} to {most:.1f} %, and the validation losses {losses}. The model is {naming.run_name(first)},
trained with log ε = {first["log_pruning_tolerance"]:g}. The text has {first["measured_tokens"]:,} held-out
tokens in sequences of {first["context_length_tokens"]:,}. (a) Pruned ratio of the kernels' blocks and of
single tokens, with the validation loss at each point. (b) The largest attention weight that any row of any
head loses to pruned blocks, by the dense float64 reference. Appendix A excludes the grey region.
{sweeps.closest(sweeps.bound_margins(records))}"""
    return draw(records), caption


def savings_fall_with_epsilon(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Reproduced if the pruned ratio never grows as epsilon falls, and is lower at the smallest epsilon than
    at the largest."""
    percent = 100 * _by_epsilon(epsilon_sweep)["block_pruned_ratio"]
    if len(percent) < 2:
        return Verdict(Word.INCONCLUSIVE, "only one epsilon")
    each = [f"{ratio:.1f} % at {sweeps.e_to(epsilon)}" for epsilon, ratio in percent.items()]
    met = percent.is_monotonic_decreasing and percent.iloc[-1] < percent.iloc[0]
    short = f"pruned blocks: {each[0]}, {each[-1]}"
    return Verdict.of(bool(met), "\nAt the other values: ".join([short, ", ".join(each[1:-1])]), short)


def default_nearly_optimal(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Reproduced if the pruned ratio at e^-1 exceeds the ratio at e^-10 by less than
    :data:`sweeps.MARGINAL_POINTS` percentage points."""
    table = _by_epsilon(epsilon_sweep)["block_pruned_ratio"]
    if not {-1.0, -10.0} <= set(table.index):
        return Verdict(Word.INCONCLUSIVE, "the sweep lacks e^-1 or e^-10")
    more = 100 * (table[-1.0] - table[-10.0])
    return Verdict.of(
        bool(more < sweeps.MARGINAL_POINTS),
        f"the pruned ratio is {more:.1f} percentage points higher at $e^{{-1}}$ than at $e^{{-10}}$",
    )


def loss_unmoved(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Reproduced if the losses at e^-10 and at the smallest epsilon differ by less than
    :data:`SAME_LOSS_NATS`."""
    table = _by_epsilon(epsilon_sweep)["loss_nats"]
    if -10.0 not in table.index or table.index[-1] >= -10.0:
        return Verdict(Word.INCONCLUSIVE, "the sweep lacks e^-10 or a smaller epsilon")
    gap, least = abs(table[-10.0] - table.iloc[-1]), sweeps.e_to(table.index[-1])
    return Verdict.of(
        bool(gap < SAME_LOSS_NATS), f"the losses at $e^{{-10}}$ and {least} differ by {gap:.6f} nats"
    )


def swept_mass_below_epsilon(epsilon_sweep: pd.DataFrame) -> Verdict:
    """Reproduced if the largest pruned mass is below epsilon at every epsilon."""
    table = one_each(epsilon_sweep, ["swept_log_pruning_tolerance"], "epsilon_sweep")
    epsilon, mass = table["swept_log_pruning_tolerance"], table["largest_pruned_mass"]
    each = {e: f"{m:.1e} at {sweeps.e_to(e)}" for e, m in zip(epsilon, mass, strict=True)}
    if (found := sweeps.mass_below(mass, epsilon)).word is Word.INCONCLUSIVE:
        return found
    paper = ", ".join(words for e, words in each.items() if e in (-1.0, -10.0))
    return replace(
        found,
        ours=f"a query loses at most {paper}\nAt all values: {', '.join(each.values())}",
        short=f"a query loses at most {paper}",
    )


def _by_epsilon(epsilon_sweep: pd.DataFrame) -> pd.DataFrame:
    """The records indexed by log epsilon, in descending order."""
    key = "swept_log_pruning_tolerance"
    return one_each(epsilon_sweep, [key], "epsilon_sweep").set_index(key).sort_index(ascending=False)
