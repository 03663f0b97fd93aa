"""The registry of ACP: its grid, its metrics, and the contents of its analysis."""

from acp_repro.pipeline.paper import Paper

from .metrics import METRICS
from .runs import FoXSuite, make_run
from .schema import File

PAPER = Paper(
    name="acp",
    title="Adaptive Computation Pruning for the Forgetting Transformer",
    url="https://arxiv.org/abs/2504.06949",
    file=File,
    suite=FoXSuite,
    make_run=make_run,
    run_columns=("architecture", "size", "context_length_tokens", "log_pruning_tolerance", "seed"),
    metrics=METRICS,
    task=f"{__package__}.task:FoXTask",
    analysis="analysis.acp",
)
