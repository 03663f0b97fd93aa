"""The registry of Adaptive Retention: its grid, its quantities, and the contents of its analysis."""

from __future__ import annotations

from acp_repro.pipeline.paper import Paper

from .quantities import QUANTITIES
from .settings import File
from .suite import RUN_COLUMNS, RetentionSuite, make_run

PAPER = Paper(
    name="retention",
    title="Learning What to Remember: Adaptive Probabilistic Memory Retention for Memory-Efficient Language "
    "Models",
    url="https://arxiv.org/abs/2510.08798",
    file=File,
    suite=RetentionSuite,
    make_run=make_run,
    run_columns=RUN_COLUMNS,
    quantities=QUANTITIES,
    task=f"{__package__}.task:task_of",
    analysis="analysis.retention",
    library=("sklearn", "retention"),
)
