"""Every claim of the Adaptive Retention paper, and every figure and table with what draws it."""

from __future__ import annotations

from acp_repro.pipeline.paper import Claim, Item

from . import (
    figure2,
    figure_gates,
    figureC,
    figureD,
    figureE,
    figureH,
    table1,
    table3,
    table4,
    table5,
    tableI,
)

IN_WORDS = (
    "The tests are at 5 %, with Holm's correction. They pair items of dev and test, or scores where records "
    "hold no items, and count how seeds differ. One task that contradicts the claim makes it fail; one that "
    "cannot tell leaves it open"
)
_IN_WORDS = (
    f"{IN_WORDS}. A task is left out if the dense model scores {table1.UNLEARNT_POINTS} points less than a "
    "bag of words, the best of six settings on the test split. The tasks of all suites count together"
)
_NEEDS = "a dense model and pruned ones at this budget"
FIGURE2 = (
    Claim(
        "Scores are robust to temperature and stretch",
        "Section Limitations, (iv): we observe robustness plateaus",
        f"two one-sided tests show that every value swept scores within {figure2.PLATEAU_POINTS:g} points "
        f"of the default. {IN_WORDS}",
        ("score",),
        figure2.plateau,
    ),
)
FIGURED = (
    Claim(
        "The Hard-Concrete gradient is unbiased",
        "Appendix D: the estimator satisfies E[g(p)] = grad E[L]",
        "at the paper's temperature the mean over samples is within three standard errors of the exact "
        "gradient, in every problem",
        ("estimator",),
        figureD.unbiased,
    ),
)
FIGUREE = (
    Claim(
        "The variance falls as 1/B",
        "Appendix E: var <= C / B",
        f"the slope of log variance against log B is -1, within {figureE.SLOPE_WITHIN:g}",
        ("variance",),
        figureE.variance_falls,
    ),
)
FIGUREH = (
    Claim(
        "The complexity of a pruned class falls as M/T",
        "Appendix H: R(masked) <= (M/T) R(full)",
        "for a linear class the measured ratio is at most M/T at every M",
        ("complexity",),
        figureH.complexity_bounded,
    ),
)
TABLE1 = (
    Claim(
        "Pruning preserves more than 95 % of the dense score",
        "Abstract: keeping only 30-50 % of tokens preserves > 95 % of full-model performance",
        "on every task, the mean over seeds of Adaptive Retention is at least "
        f"{100 * table1.KEPT_OF_DENSE:g} % of the dense model's. {_IN_WORDS}",
        ("score", "bag_of_words"),
        table1.keeps_dense_score,
        pooled=True,
    ),
    Claim(
        "Learned retention beats random pruning",
        "Section 4.3: consistently outperforms H2O and Random across tasks and budgets",
        "on every task, the mean score of Adaptive Retention is above that of random pruning, both "
        f"fine-tuned. {_IN_WORDS}",
        ("score", "bag_of_words"),
        table1.beats_random,
        pooled=True,
    ),
    Claim(
        "Learned retention beats H2O",
        "Section 4.3: consistently outperforms H2O and Random across tasks and budgets",
        "on every task, the mean score of Adaptive Retention is above that of H2O, both fine-tuned. "
        f"{_IN_WORDS}",
        ("score", "bag_of_words"),
        table1.beats_h2o,
        pooled=True,
    ),
)
TABLE3 = (
    Claim(
        "Every part of the method is needed",
        "Table 3: each ablation loses 0.5 to 4 points",
        "on every task and at every budget each ablation loses. "
        f"{IN_WORDS}. An ablation without a loss contradicts it where a loss as large as the paper "
        "prints is ruled out",
        ("score",),
        table3.ablations_lose,
    ),
)
TABLE4 = (
    Claim(
        "Throughput rises 1.8 times at 30 %",
        "Table 4: 1.80x",
        f"at the longest length measured, at 30 %, it is {table4.THROUGHPUT:g} times the dense model's. "
        "More is beyond the paper's number",
        ("speed",),
        table4.throughput_rises,
    ),
    Claim(
        "The scorer costs less than 2 % of the time",
        "Section Limitations, (ii): < 2 % latency in our profiles",
        "at the longest length measured, the scorer takes under 2 % of a batch's time",
        ("speed",),
        table4.scorer_is_cheap,
    ),
    Claim(
        "Peak memory falls by 35 to 45 %",
        "Abstract: cutting peak memory by about 35-45 %",
        "at the longest length measured, without the weights, by {} to {} %. More is beyond the paper's "
        "range".format(*table4.MEMORY_SAVED_PERCENT),
        ("speed",),
        table4.memory_falls,
    ),
)
TABLE5 = (
    Claim(
        "The tokens kept fit the budget",
        "Figure 1: the top M_l = floor(rho T_l) tokens of each layer; Tables 5 and 6 keep more than 30 %",
        "with the constant and the geometric schedule no layer keeps more than the budget",
        ("tokens_kept",),
        table5.budget_holds,
    ),
)
TABLEI = (
    Claim(
        "Removal saves more the longer the text",
        "Appendix I: O(M² d) against O(T² d)",
        "on every task with at least two lengths, never slower than dense, and faster the longer the text. "
        "This tests the direction that M² against T² has; two lengths show no exponent",
        ("speed",),
        tableI.saves_more_when_longer,
    ),
)
TEXT = (
    Claim(
        "The slack of a minimiser is at most the gap over lambda",
        "Appendix C, Proposition 1: $A \\leq (F^* - E[L]) / \\lambda$",
        "lambda times the slack is at most the gap, for exact minimisers of random losses of five tokens and "
        "p within the budget. It says nothing of models whose training ends elsewhere, as here",
        test="tests/retention/test_parts.py::test_the_slack_of_a_minimiser_is_at_most_the_gap_over_lambda",
    ),
    Claim(
        "The duality gap bounds the slack",
        "Appendix G, Lemma 3: $\\mathrm{Gap}_\\lambda \\geq \\lambda A$, also of infeasible minimisers",
        "a minimiser over the budget has a loss of at least F*",
        test="tests/retention/test_parts.py::test_the_duality_gap_does_not_bound_the_slack_of_a_minimiser_over_the_budget",
        refuted="wrong as printed: a minimiser over the budget may have a lower loss than F*. The gap is "
        "then negative, by Appendix C itself, and lambda A is not",
    ),
)
CLAIMS = TEXT
ITEMS = (
    Item(
        "table1",
        table1.make,
        "Results at 50 % of the tokens",
        ("score", "bag_of_words"),
        lambda suite: suite.of_table(0.5),
        _NEEDS,
        TABLE1,
    ),
    Item(
        "table2",
        table1.make,
        "Results at 30 % of the tokens",
        ("score", "bag_of_words"),
        lambda suite: suite.of_table(0.3),
        _NEEDS,
        TABLE1,
    ),
    Item(
        "table3",
        table3.make,
        "Ablations",
        ("score", "speed"),
        lambda suite: suite.ablations(),
        "an ablation",
        TABLE3,
    ),
    Item("table4", table4.make, "Compute cost", ("speed",), lambda suite: suite.timed(), claims=TABLE4),
    Item(
        "table5",
        table5.make,
        "Tokens kept in each layer",
        ("tokens_kept",),
        lambda suite: table5._one_a_budget(r for r in suite.adaptive if r.backbone.num_hidden_layers != 12),
        "Adaptive Retention in an encoder of another depth than 12",
        TABLE5,
    ),
    Item(
        "table6",
        table5.make,
        "Tokens kept in each of 12 layers",
        ("tokens_kept",),
        lambda suite: table5._one_a_budget(r for r in suite.adaptive if r.backbone.num_hidden_layers == 12),
        "Adaptive Retention in an encoder of 12 blocks",
        TABLE5,
    ),
    Item(
        "figure2",
        figure2.make,
        "Temperature and stretch",
        ("score",),
        lambda suite: suite.sweeps(),
        "Adaptive Retention at several temperatures or stretches",
        FIGURE2,
    ),
    Item(
        "figure_gates",
        figure_gates.make,
        "Where the gate stands",
        ("pruned_dense", "bag_of_words"),
        lambda suite: suite.dense,
        "a dense model",
        ours=True,
    ),
    Item(
        "figureC",
        figureC.make,
        "Slack of the budget",
        ("slackness",),
        lambda suite: suite.adaptive,
        "Adaptive Retention",
        ours=True,
    ),
    Item("figureD", figureD.make, "Bias of the relaxed gradient", ("estimator",), claims=FIGURED, ours=True),
    Item("figureE", figureE.make, "Variance of the gradient", ("variance",), claims=FIGUREE, ours=True),
    Item("figureH", figureH.make, "Complexity of a pruned class", ("complexity",), claims=FIGUREH, ours=True),
    Item(
        "tableI",
        tableI.make,
        "FLOPs and time",
        ("speed",),
        lambda suite: suite.timed(),
        claims=TABLEI,
        ours=True,
    ),
)
