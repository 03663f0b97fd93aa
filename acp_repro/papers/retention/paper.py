"""The registry of Adaptive Retention: its grid, its metrics, and the contents of its analysis."""

from acp_repro.pipeline.paper import Paper

from .metrics import METRICS
from .runs import RUN_COLUMNS, RetentionSuite, make_run
from .schema import File

PAPER = Paper(
    name="retention",
    title="Learning What to Remember: Adaptive Probabilistic Memory Retention for Memory-Efficient Language "
    "Models",
    url="https://arxiv.org/abs/2510.08798",
    file=File,
    suite=RetentionSuite,
    make_run=make_run,
    run_columns=RUN_COLUMNS,
    metrics=METRICS,
    task=f"{__package__}.task:task_of",
    analysis="analysis.retention",
    library=("sklearn", "retention"),
)
