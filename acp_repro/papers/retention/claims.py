"""What the paper on Adaptive Retention says of its tables and figures, and the words that check it."""

from __future__ import annotations

from acp_repro.chain.paper import Claim

KEPT_OF_DENSE = 0.95
PLATEAU_POINTS = 2.0
_ERROR = (
    "by 95 % intervals from the errors of the test examples and, where there are several, of seeds (one "
    "comparison contradicts it, after Holm's correction); else it cannot be told"
)
SLOPE_WITHIN = 0.05

RESULTS = (
    Claim(
        "Pruning preserves more than 95 % of the dense score",
        "Abstract: keeping only 30-50 % of tokens preserves > 95 % of full-model performance",
        f"on every task, the mean over seeds of Adaptive Retention is at least {100 * KEPT_OF_DENSE:g} % of "
        f"the dense model's, {_ERROR}",
        ("score",),
        "keeps_dense_score",
    ),
    Claim(
        "Learned retention beats random pruning",
        "Section 4.3: consistently outperforms H2O and Random across tasks and budgets",
        "on every task, the mean score of Adaptive Retention is above that of random pruning, both "
        f"fine-tuned, {_ERROR}",
        ("score",),
        "beats_random",
    ),
    Claim(
        "Learned retention beats H2O",
        "Section 4.3: consistently outperforms H2O and Random across tasks and budgets",
        "on every task, the mean score of Adaptive Retention is above that of H2O, both fine-tuned, "
        f"{_ERROR}",
        ("score",),
        "beats_h2o",
    ),
)
ABLATIONS = (
    Claim(
        "Every part of the method is needed",
        "Table 3: each ablation loses 0.5 to 4 points",
        f"on every task and at every budget each ablation's mean score is below the full method's, {_ERROR}",
        ("score",),
        "ablations_lose",
    ),
)
SPEED = (
    Claim(
        "Throughput rises 1.8 times at 30 %",
        "Table 4: 1.80x",
        "at the longest length measured, at 30 %, it is at least 1.8 times the dense model's",
        ("speed",),
        "throughput_rises",
    ),
    Claim(
        "The scorer costs less than 2 % of the time",
        "Section Limitations, (ii): < 2 % latency in our profiles",
        "at the longest length measured, the scorer takes under 2 % of a batch's time",
        ("speed",),
        "scorer_is_cheap",
    ),
    Claim(
        "Peak memory falls by 35 to 45 %",
        "Abstract: cutting peak memory by about 35-45 %",
        "at the longest length measured, weights aside, by at least 35 % at 50 % and 45 % at 30 %",
        ("speed",),
        "memory_falls",
    ),
)
BUDGET = (
    Claim(
        "The tokens kept fit the budget",
        "Figure 1: the top M_l = floor(rho T_l) tokens of each layer; Tables 5 and 6 keep more than 30 %",
        "with the constant and the geometric schedule no layer keeps more than the budget",
        ("tokens_kept",),
        "budget_holds",
    ),
)
SWEEPS = (
    Claim(
        "Scores are robust to temperature and stretch",
        "Section Limitations, (iv): we observe robustness plateaus",
        f"every value swept scores within {PLATEAU_POINTS:g} points of the default, {_ERROR}",
        ("score",),
        "plateau",
    ),
)
SLACKNESS = (
    Claim(
        "The slack is bounded by the gap over lambda",
        "Appendix C (and G): A <= (F* - E[L]) / lambda",
        "in every model, lambda times the slack is at most the loss with top-M less the loss with soft "
        "gates; top-M is feasible, so F* is no larger",
        ("slackness",),
        "slack_bounded",
    ),
)
BIAS = (
    Claim(
        "The Hard-Concrete gradient is unbiased",
        "Appendix D: the estimator satisfies E[g(p)] = grad E[L]",
        "at the paper's temperature the mean over samples is within three standard errors of the exact "
        "gradient, in every problem",
        ("estimator",),
        "unbiased",
    ),
)
VARIANCE = (
    Claim(
        "The variance falls as 1/B",
        "Appendix E: var <= C / B",
        f"the slope of log variance against log B is -1, within {SLOPE_WITHIN:g}",
        ("variance",),
        "variance_falls",
    ),
)
COMPLEXITY = (
    Claim(
        "The complexity of a pruned class falls as M/T",
        "Appendix H: R(masked) <= (M/T) R(full)",
        "for a linear class the measured ratio is at most M/T at every M",
        ("complexity",),
        "complexity_bounded",
    ),
)
COST = (
    Claim(
        "Attention over M tokens costs M² instead of T²",
        "Appendix I: O(M² d) against O(T² d)",
        "on every task with at least two lengths: never slower than dense, and faster the longer the text",
        ("speed",),
        "saves_more_when_longer",
    ),
)
