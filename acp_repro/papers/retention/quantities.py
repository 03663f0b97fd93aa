"""Every quantity of Adaptive Retention: its columns, its runs, and the function that measures it."""

from __future__ import annotations

from acp_repro.pipeline.paper import Quantity, first_seeds

M = f"{__package__}.measure"
SIMULATIONS = "python -m acp_repro.papers.retention.simulations --suite {suite}"
RIGHT, WRONG = "+-"  # an example in `items_right`

QUANTITIES = (
    Quantity(
        "masked_loss",
        "masked_loss_nats masked_accuracy_percent measured_tokens",
        f"{M}.scores:measure_masked_loss",
        lambda suite: suite.pretrained,
    ),
    Quantity(
        "score",
        "split metric score_percent loss_nats measured_examples kept_share items_hash items_right",
        f"{M}.scores:measure_score",
        lambda suite: suite.tuned,
    ),
    Quantity(
        "bag_of_words",
        "split metric words_in_a_row inverse_regularization score_percent measured_examples",
        f"{M}.scores:measure_bag_of_words",
        lambda suite: [run for run in first_seeds(suite.dense) if not run.dataset.is_extractive],
        untrained=lambda run: True,
    ),
    Quantity(
        "pruned_dense",
        "pruning pruning_gates pruning_budget metric score_percent loss_nats measured_examples kept_share",
        f"{M}.scores:measure_pruned_dense",
        lambda suite: suite.dense,
    ),
    Quantity(
        "tokens_kept",
        "schedule layer kept_share measured_examples",
        f"{M}.budgets:measure_tokens_kept",
        lambda suite: suite.adaptive,
    ),
    Quantity(
        "slackness",
        "gate multiplier unit counted_tokens open_tokens budget_tokens slack_tokens soft_loss_nats "
        "hard_loss_nats measured_examples",
        f"{M}.budgets:measure_slackness",
        lambda suite: suite.adaptive,
    ),
    Quantity(
        "speed",
        "length_tokens batch_examples repeats batch_ms+ dense_batch_ms+ scorer_ms throughput_tokens_per_s "
        "dense_throughput_tokens_per_s peak_memory_bytes dense_peak_memory_bytes training_batch_examples "
        "training_batch_ms+ dense_training_batch_ms+ training_peak_memory_bytes "
        "dense_training_peak_memory_bytes example_flop dense_example_flop order",
        f"{M}.speed:measure_speed",
        lambda suite: suite.timed(),
        untrained=lambda run: run.is_timed_untrained,
    ),
    # On problems small enough for the exact answer, without a run.
    Quantity(
        "estimator",
        "relaxation swept_temperature problem tokens samples relative_bias relative_bias_error "
        "relative_variance",
        command=SIMULATIONS,
    ),
    Quantity("variance", "batch_samples repeats gradient_variance", command=SIMULATIONS),
    Quantity(
        "complexity",  # of a class under random retention (Appendix H)
        "tokens kept_tokens repeats complexity complexity_ratio claimed_ratio root_ratio",
        command=SIMULATIONS,
    ),
)
