"""The claims, figures and tables of the Adaptive Retention paper, with the functions that draw and judge."""

from dataclasses import replace

from acp_repro.pipeline.paper import FigureSpec

from ..published import claims_of
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

CLAIMED = claims_of(__package__)
CLAIMS = CLAIMED["text"]
NEEDS = "a dense model and pruned ones at this budget"
LIKE = {"table2": "table1", "table6": "table5"}  # the same claims
ITEMS = tuple(
    replace(item, claims=CLAIMED.get(LIKE.get(item.name, item.name), ()))
    for item in (
        FigureSpec(
            "table1",
            table1.make,
            "Results at 50 % of the tokens",
            ("score", "bag_of_words"),
            lambda suite: suite.table_runs(0.5),
            NEEDS,
        ),
        FigureSpec(
            "table2",
            table1.make,
            "Results at 30 % of the tokens",
            ("score", "bag_of_words"),
            lambda suite: suite.table_runs(0.3),
            NEEDS,
        ),
        FigureSpec(
            "table3",
            table3.make,
            "Ablations",
            ("score", "speed"),
            lambda suite: suite.ablations(),
            "an ablation",
        ),
        FigureSpec("table4", table4.make, "Compute cost", ("speed",), lambda suite: suite.benchmarked()),
        FigureSpec(
            "table5",
            table5.make,
            "Tokens kept in each layer",
            ("keep_ratio_by_layer",),
            lambda suite: table5.one_a_budget(suite, deep=False),
            "Adaptive Retention in an encoder of another depth than 12",
        ),
        FigureSpec(
            "table6",
            table5.make,
            "Tokens kept in each of 12 layers",
            ("keep_ratio_by_layer",),
            lambda suite: table5.one_a_budget(suite, deep=True),
            "Adaptive Retention in an encoder of 12 blocks",
        ),
        FigureSpec(
            "figure2",
            figure2.make,
            "Temperature and stretch",
            ("score",),
            lambda suite: suite.sweeps(),
            "Adaptive Retention at several temperatures or stretches",
        ),
        FigureSpec(
            "figure_gates",
            figure_gates.make,
            "Position of the gate",
            ("pruned_dense", "bag_of_words", "score"),
            lambda suite: suite.dense and [*suite.dense, *suite.adaptive],
            "a dense model",
            ours=True,
        ),
        FigureSpec(
            "figureC",
            figureC.make,
            "Slack of the budget",
            ("slackness",),
            lambda suite: suite.adaptive,
            "Adaptive Retention",
            ours=True,
        ),
        FigureSpec("figureD", figureD.make, "Bias of the relaxed gradient", ("estimator",), ours=True),
        FigureSpec("figureE", figureE.make, "Variance of the gradient", ("variance",), ours=True),
        FigureSpec("figureH", figureH.make, "Complexity of a pruned class", ("complexity",), ours=True),
        FigureSpec(
            "tableI", tableI.make, "FLOPs and time", ("speed",), lambda suite: suite.benchmarked(), ours=True
        ),
    )
)
