"""Statements of the paper that no figure or table holds."""

from __future__ import annotations

from acp_repro.pipeline.paper import Claim

_SHOWN = "tests/retention/test_parts.py::"

CLAIMS = (
    Claim(
        "The slack of a minimiser is at most the gap over lambda",
        "Appendix C, Proposition 1: $A \\leq (F^* - E[L]) / \\lambda$",
        "lambda times the slack is at most the gap, for exact minimisers of random losses of five tokens and "
        "p within the budget. It says nothing of models whose training ends elsewhere, as here",
        test=f"{_SHOWN}test_the_slack_of_a_minimiser_is_at_most_the_gap_over_lambda",
    ),
    Claim(
        "The duality gap bounds the slack",
        "Appendix G, Lemma 3: $\\mathrm{Gap}_\\lambda \\geq \\lambda A$, also of infeasible minimisers",
        "a minimiser over the budget has a loss of at least F*",
        test=f"{_SHOWN}test_the_duality_gap_does_not_bound_the_slack_of_a_minimiser_over_the_budget",
        refuted="wrong as printed: a minimiser over the budget may have a lower loss than F*. The gap is "
        "then negative, by Appendix C itself, and lambda A is not",
    ),
)
