"""What the figures that look at one model (7, A1, A2) share: derived numbers, and how they read."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ..verdict import Verdict, Word

MARGINAL_POINTS = 5.0  # a difference of savings that counts as marginal or negligible


def bound_margins(records: pd.DataFrame) -> pd.Series:
    """How many times the largest pruned mass goes into epsilon, for each record of ``epsilon_sweep``."""
    return np.exp(records["swept_log_pruning_tolerance"]) / records["largest_pruned_mass"]


def head_margins(records: pd.DataFrame) -> pd.Series:
    """The same for each head of ``pruned_mass`` records, at the epsilon of their run."""
    return np.exp(records["log_pruning_tolerance"]) / records["largest_pruned_mass"]


def slack_shares(records: pd.DataFrame) -> pd.Series:
    """``threshold_slack_nats`` of each head as a share of -delta: 0, delta is tight; 1, it could be 0."""
    return records["threshold_slack_nats"] / -records["threshold_nats"]


def closest(margins: pd.Series) -> str:
    """The smallest of margins to epsilon as a sentence, which is another where nothing was pruned."""
    if margins.isna().all():
        return "No row has a pruned block."
    return f"No row comes closer to ε than a factor of {power_of_ten(margins.min())}."


def power_of_ten(value: float) -> str:
    """8123456 -> "8·10⁶", 23.4 -> "23", for labels and captions alike."""
    assert 0 < value < math.inf, value
    if 1 <= value < 99.5:
        return f"{value:.2g}"
    digit, exponent = f"{value:.0e}".split("e")
    power = f"10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return power if digit == "1" else f"{digit}·{power}"


def mass_below(mass: pd.Series, log_epsilon: pd.Series) -> Verdict:
    """Met if no row loses epsilon. Rows without a pruned block have no mass and say nothing."""
    has = mass.notna()
    if not has.any():
        return Verdict(Word.INCONCLUSIVE, "nothing is pruned")
    log_mass = mass[has].map(lambda m: math.log(m) if m > 0 else -math.inf)
    margin = log_epsilon[has] - log_mass
    nearest = margin.idxmin()
    ours = f"a query loses at most {mass[nearest]:.1e}; bound {math.exp(log_epsilon[nearest]):.1e}"
    return Verdict.of(bool((margin > 0).all()), ours)


def e_to(exponent: float) -> str:
    """-10 -> "$e^{-10}$"."""
    return f"$e^{{{exponent:g}}}$"
