"""The registry of LAP: its grid, its quantities, and the contents of its analysis."""

from __future__ import annotations

from acp_repro.pipeline.paper import Paper

from .quantities import QUANTITIES
from .settings import File
from .suite import RUN_COLUMNS, PruningSuite, make_run

PAPER = Paper(
    name="lap",
    title="Learnable Attention Pruning",
    url="https://github.com/ATMI/Megatoken",
    file=File,
    suite=PruningSuite,
    make_run=make_run,
    run_columns=RUN_COLUMNS,
    quantities=QUANTITIES,
    task=f"{__package__}.task:PruningTask",
    analysis="analysis.lap",
    library=("shap", "lap"),
)
