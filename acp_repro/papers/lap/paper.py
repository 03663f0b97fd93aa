"""The registry of LAP: its grid, its metrics, and the contents of its analysis."""

from acp_repro.pipeline.paper import Paper

from .metrics import METRICS
from .runs import RUN_COLUMNS, PruningSuite, make_run
from .schema import File

PAPER = Paper(
    name="lap",
    title="Learnable Attention Pruning",
    url="https://github.com/ATMI/Megatoken",
    file=File,
    suite=PruningSuite,
    make_run=make_run,
    run_columns=RUN_COLUMNS,
    metrics=METRICS,
    task=f"{__package__}.task:PruningTask",
    analysis="analysis.lap",
    library=("shap", "lap"),
)
