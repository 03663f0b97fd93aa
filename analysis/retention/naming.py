"""The names of the methods and models of Adaptive Retention in tables, figures and the report."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from acp_repro.papers.retention.runs import PretrainingRun, RetentionRun, RetentionSuite
from acp_repro.pipeline.paper import FigureSpec

from ..published import published

PUBLISHED = published("analysis.retention")
# Names as in the paper's tables, in their order.
METHODS = {
    "dense": "Full Transformer",
    "random": "Random pruning",
    "h2o": "H2O",
    "top": "Constraint-aware pruning",
    "infor_coef": "Infor-Coef",
    "ar": "Adaptive Retention",
    "ar_no_relaxation": "Without variational relaxation",
    "ar_joint": "Without alternating optimization",
    "ar_fixed": "With a fixed multiplier",
    "ar_threshold": "Threshold instead of top-M",
}
PLACES = {"input": "at the input", "after_blocks": "after blocks", "output": "at the output", "none": ""}

OWN_TASKS = ("facts", "haystack")


def row_name(method: str, gates: str) -> str:
    """ "H2O, at the input"."""
    return ", ".join(filter(None, (METHODS[method], PLACES[gates])))


def score_name(row: Any) -> str:
    """The column of a ``score`` record: "imdb accuracy"."""
    return f"{row.dataset} {row.metric.replace('_', ' ')}"


def own_tasks(records: pd.DataFrame) -> str:
    """A sentence that names the project's own tasks in the records; empty if there are none."""
    own = [name for name in OWN_TASKS if (records["dataset"] == name).any()]
    subject = f"The tasks {' and '.join(own)} are" if len(own) > 1 else f"The task {''.join(own)} is"
    return f"{subject} the project's own. " if own else ""


def run_cells(run: RetentionRun | PretrainingRun) -> dict[str, str]:
    """The columns of a run in the report's table of runs."""
    pretrains = isinstance(run, PretrainingRun)
    plain = run.is_dense or pretrains
    return {
        "task": run.dataset_name,
        "encoder": run.backbone_name,
        "method": "Masked language modelling" if pretrains else METHODS[run.method],
        "budget": "" if plain else f"{100 * run.budget:g} %",
        "gates": PLACES[run.gates],
        "relaxation": "" if plain else ", ".join(f"{x:g}" for x in run.relaxation),
        "seed": str(run.seed),
    }


def describe(suite: RetentionSuite) -> str:
    """The encoders and tasks of a suite, as part of a sentence."""
    return shapes(suite.tuned)


def _shape(backbone) -> str:
    if backbone.pretrained:
        return f"weights of {backbone.pretrained}"
    start = (
        f"pre-trained here on data set {backbone.pretrained_on}" if backbone.pretrained_on else "from scratch"
    )
    return f"{backbone.num_hidden_layers} blocks of width {backbone.hidden_size}, {start}"


def shapes(runs: Sequence[RetentionRun]) -> str:
    """The encoders and tasks of ``runs``, as part of a sentence."""
    encoders = dict.fromkeys(f"{run.backbone_name} ({_shape(run.backbone)})" for run in runs)
    return (
        f"{', '.join(encoders)}, fine-tuned on {', '.join(dict.fromkeys(run.dataset_name for run in runs))}"
    )


def at_paper_scale(item: FigureSpec, runs: Sequence[RetentionRun]) -> bool:
    """Whether all encoders start from published weights, as in the paper."""
    return bool(runs) and all(run.backbone.pretrained for run in runs)


def means(score: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Mean, standard deviation and number of scores over the seeds of each setting in ``columns``."""
    grouped = score.groupby(columns, sort=False, dropna=False)["score_percent"]
    return grouped.agg(["mean", "std", "count"]).reset_index()
