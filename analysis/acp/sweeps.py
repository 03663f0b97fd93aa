"""Derived numbers and texts shared by Figures 7, A1 and A2, which evaluate one model."""

import math

import numpy as np
import pandas as pd

from ..verdict import Verdict, Word

MARGINAL_POINTS = 5.0  # a difference of savings that counts as marginal or negligible


def bound_margins(records: pd.DataFrame) -> pd.Series:
    """Epsilon divided by the largest pruned mass, for each record of ``epsilon_sweep``."""
    return np.exp(records["swept_log_pruning_tolerance"]) / records["largest_pruned_mass"]


def head_margins(records: pd.DataFrame) -> pd.Series:
    """Epsilon divided by the largest pruned mass, for each head of ``pruned_mass`` records."""
    return np.exp(records["log_pruning_tolerance"]) / records["largest_pruned_mass"]


def slack_shares(records: pd.DataFrame) -> pd.Series:
    """``threshold_slack_nats`` of each head over -delta: 0 for a tight delta, 1 if delta could be 0."""
    return records["threshold_slack_nats"] / -records["threshold_nats"]


def closest(margins: pd.Series) -> str:
    """A sentence on the smallest margin to epsilon, or on the absence of pruned blocks."""
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
    """Reproduced if every pruned mass is below epsilon. Rows without a pruned block have no mass."""
    has = mass.notna()
    if not has.any():
        return Verdict(Word.INCONCLUSIVE, "nothing is pruned")
    log_mass = mass[has].map(lambda m: math.log(m) if m > 0 else -math.inf)
    margin = log_epsilon[has] - log_mass
    nearest = margin.idxmin()
    ours = (
        f"largest measured loss of a query: {mass[nearest]:.1e} "
        f"(proved bound: {math.exp(log_epsilon[nearest]):.1e})"
    )
    return Verdict.of(bool((margin > 0).all()), ours)


def e_to(exponent: float) -> str:
    """-10 -> "$e^{-10}$"."""
    return f"$e^{{{exponent:g}}}$"
