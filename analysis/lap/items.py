"""The claims, figures and tables of the LAP article, with the functions that draw and judge them."""

from dataclasses import replace

from acp_repro.pipeline.paper import FigureSpec

from ..published import claims_of
from . import (
    figure_curve,
    figure_dynamics,
    figure_probing,
    figure_savings,
    figure_shap,
    figure_slices,
    table_scores,
    table_words,
)

CLAIMED = claims_of(__package__)
CLAIMS = CLAIMED["text"]
ITEMS = tuple(
    replace(item, claims=CLAIMED.get(item.name, ()))
    for item in (
        FigureSpec(
            "figure_dynamics",
            figure_dynamics.make,
            "Training dynamics",
            ("dynamics",),
            lambda suite: [suite.main_run],
        ),
        FigureSpec(
            "table_scores",
            table_scores.make,
            "Accuracy, BLEU and ROUGE on held-out text",
            ("reconstruction",),
        ),
        FigureSpec(
            "figure_probing",
            figure_probing.make,
            "Probing classifier against its baselines",
            ("probe",),
            lambda suite: suite.probed,
            "texts with labels",
        ),
        FigureSpec(
            "figure_shap",
            figure_shap.make,
            "Contribution of each vector to each generated token",
            ("attribution",),
            lambda suite: [suite.main_run],
        ),
        FigureSpec(
            "figure_curve",
            figure_curve.make,
            "Accuracy against compression",
            ("reconstruction",),
            lambda suite: list(suite.runs) if suite.gated else [],
            "gates",
            ours=True,
        ),
        FigureSpec(
            "figure_slices",
            figure_slices.make,
            "Positions of a vector's attribution in the text",
            ("attribution",),
            lambda suite: [suite.main_run],
            ours=True,
        ),
        FigureSpec(
            "table_words",
            table_words.make,
            "Keep ratio by token",
            ("keep_ratio_by_word",),
            lambda suite: [suite.main_run],
            ours=True,
        ),
        FigureSpec(
            "figure_savings",
            figure_savings.make,
            "Savings of token removal",
            ("removal_time",),
            lambda suite: [suite.main_run],
            ours=True,
        ),
    )
)
