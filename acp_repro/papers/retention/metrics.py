"""Every metric of Adaptive Retention: its columns, its runs, and the function that measures it."""

from __future__ import annotations

from acp_repro.pipeline.paper import Metric, first_seeds, samples

from . import measure

SIMULATIONS = "python -m acp_repro.papers.retention.simulations --suite {suite}"

METRICS = (
    Metric(
        "masked_loss",
        ("masked_loss_nats", "masked_accuracy_percent", "measured_tokens"),
        lambda: measure.scores.measure_masked_loss,
        lambda suite: suite.pretrained,
    ),
    Metric(
        "score",
        (
            "split",
            "metric",
            "score_percent",
            "loss_nats",
            "measured_examples",
            "keep_ratio",
            "items_hash",
            "items_right",
        ),
        lambda: measure.scores.measure_score,
        lambda suite: suite.tuned,
    ),
    Metric(
        "bag_of_words",
        ("split", "metric", "words_in_a_row", "inverse_regularization", "score_percent", "measured_examples"),
        lambda: measure.scores.measure_bag_of_words,
        lambda suite: [run for run in first_seeds(suite.dense) if not run.dataset.is_extractive],
        untrained=lambda run: True,
    ),
    Metric(
        "pruned_dense",
        (
            "pruning",
            "pruning_gates",
            "pruning_budget",
            "metric",
            "score_percent",
            "loss_nats",
            "measured_examples",
            "keep_ratio",
        ),
        lambda: measure.scores.measure_pruned_dense,
        lambda suite: suite.dense,
    ),
    Metric(
        "keep_ratio_by_layer",
        ("schedule", "layer", "keep_ratio", "measured_examples"),
        lambda: measure.budgets.measure_tokens_kept,
        lambda suite: suite.adaptive,
    ),
    Metric(
        "slackness",
        (
            "gate",
            "multiplier",
            "unit",
            "counted_tokens",
            "open_tokens",
            "budget_tokens",
            "slack_tokens",
            "soft_loss_nats",
            "hard_loss_nats",
            "measured_examples",
        ),
        lambda: measure.budgets.measure_slackness,
        lambda suite: suite.adaptive,
    ),
    Metric(
        "speed",
        (
            "length_tokens",
            "batch_examples",
            "repeats",
            *samples("batch_ms"),
            *samples("dense_batch_ms"),
            "scorer_ms",
            "throughput_tokens_per_s",
            "dense_throughput_tokens_per_s",
            "peak_memory_bytes",
            "dense_peak_memory_bytes",
            "training_batch_examples",
            *samples("training_batch_ms"),
            *samples("dense_training_batch_ms"),
            "training_peak_memory_bytes",
            "dense_training_peak_memory_bytes",
            "example_flop",
            "dense_example_flop",
            "order",
        ),
        lambda: measure.speed.measure_speed,
        lambda suite: suite.benchmarked(),
        untrained=lambda run: run.is_timed_untrained,
    ),
    # On problems small enough for the exact answer, without a run.
    Metric(
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
        command=SIMULATIONS,
    ),
    Metric("variance", ("batch_samples", "repeats", "gradient_variance"), command=SIMULATIONS),
    Metric(
        "complexity",  # of a class under random retention (Appendix H)
        ("tokens", "kept_tokens", "repeats", "complexity", "complexity_ratio", "claimed_ratio", "root_ratio"),
        command=SIMULATIONS,
    ),
)
