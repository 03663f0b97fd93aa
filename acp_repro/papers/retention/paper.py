"""What the chain knows of Adaptive Retention: its grid, its quantities, and the contents of its analysis."""

from __future__ import annotations

from acp_repro.chain.paper import Paper, Quantity
from acp_repro.chain.run import Run

from .settings import File
from .suite import RetentionSuite, make_run

_MEASURE = f"{__package__}.measure"
_SIMULATE = f"python -m {__package__}.simulations --suite {{suite}}"


def _every(suite: RetentionSuite) -> list[Run]:
    return suite.tuned


def _quantity(name: str, columns: str, runs=_every, **facts) -> Quantity:
    return Quantity(name, tuple(columns.split()), f"{_MEASURE}.{name}", runs, **facts)


QUANTITIES = (
    _quantity(
        "masked_loss",
        "masked_loss_nats masked_accuracy_percent measured_tokens",
        lambda suite: suite.pretrained,
    ),
    _quantity("score", "split metric score_percent loss_nats measured_examples kept_share"),
    _quantity(
        "pruned_dense",
        "pruning pruning_gates pruning_budget metric score_percent loss_nats measured_examples kept_share",
        lambda suite: suite.dense,
    ),
    _quantity("tokens_kept", "schedule layer kept_share measured_examples", lambda suite: suite.adaptive),
    _quantity(
        "slackness",
        "gate multiplier unit counted_tokens open_tokens budget_tokens slack_tokens soft_loss_nats "
        "hard_loss_nats measured_examples",
        lambda suite: suite.adaptive,
    ),
    _quantity(
        "speed",
        "length_tokens batch_examples repeats batch_ms dense_batch_ms scorer_ms throughput_tokens_per_s "
        "dense_throughput_tokens_per_s peak_memory_bytes dense_peak_memory_bytes "
        "training_batch_examples training_batch_ms dense_training_batch_ms training_peak_memory_bytes "
        "dense_training_peak_memory_bytes example_flop dense_example_flop order",
        lambda suite: suite.timed(),
        timed=True,
        later=("order",),
        untrained=lambda run: run.is_timed_untrained,
    ),
    # On problems small enough to know the truth, so of no run.
    Quantity(
        "estimator",
        (
            "relaxation",
            "swept_temperature",
            "problem",
            "tokens",
            "samples",
            "relative_bias",
            "relative_bias_error",
            "relative_variance",
        ),
        command=_SIMULATE,
    ),
    Quantity("variance", ("batch_samples", "repeats", "gradient_variance"), command=_SIMULATE),
    Quantity(
        "complexity",
        ("tokens", "kept_tokens", "repeats", "complexity", "complexity_ratio", "claimed_ratio", "root_ratio"),
        command=_SIMULATE,
    ),
)


PAPER = Paper(
    name="retention",
    title="Learning What to Remember: Adaptive Probabilistic Memory Retention for Memory-Efficient Language "
    "Models",
    url="https://arxiv.org/abs/2510.08798",
    file=File,
    suite=RetentionSuite,
    axes=(
        "dataset",
        "backbone",
        "method",
        "budget",
        "gates",
        "temperature",
        "stretch_low",
        "stretch_high",
        "seed",
    ),
    make_run=make_run,
    run_columns=(
        "dataset",
        "backbone",
        "method",
        "budget",
        "gates",
        "temperature",
        "stretch_low",
        "stretch_high",
        "seed",
    ),
    quantities=QUANTITIES,
    contents=(
        *("table1", "table2", "table3", "table4", "table5", "table6", "figure2", "figure_gates"),
        *("figureC", "figureD", "figureE", "figureH", "tableI"),
    ),
    task=f"{__package__}.task:task_of",
    steps=f"{__package__}.texts:steps_of",
    analysis="analysis.retention",
)
