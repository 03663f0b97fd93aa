"""What the chain knows of ACP: its grid, its quantities, and the contents of its analysis."""

from __future__ import annotations

from acp_repro.pipeline.paper import Page, Paper

from .settings import File
from .suite import FoXSuite, make_run

PAPER = Paper(
    name="acp",
    title="Adaptive Computation Pruning for the Forgetting Transformer",
    url="https://arxiv.org/abs/2504.06949",
    file=File,
    suite=FoXSuite,
    make_run=make_run,
    run_columns=("architecture", "size", "context_length_tokens", "log_pruning_tolerance", "seed"),
    measures=f"{__package__}.measure",
    measured=(
        *("pruned_ratio", "attention_time", "throughput", "loss_curve", "loss", "decay"),
        *("attention_weights", "epsilon_sweep", "pruned_mass", "block_size", "lm_eval"),
        *("lm_eval_items", "needle", "needle_facts", "training_log", "step_losses"),
        *("kernel_time", "training_step", "fork", "decode_time"),
    ),
    task=f"{__package__}.task:FoXTask",
    analysis="analysis.acp",
    pages=(
        Page(
            "heads",
            "Every head of a model, and which tokens each token attends to",
            "acp_repro.inspect {folder} --html {page}",
            "acp_repro.explorer.explorer",
            lambda suite: suite.heads_run,
        ),
    ),
)
