"""The metrics of Adaptive Retention: for each metric the function that measures it and its runs."""

from acp_repro.papers import retention
from acp_repro.pipeline.paper import Metric, first_seeds

from . import measure

SIMULATIONS = "python -m acp_repro.papers.retention.simulations --suite {suite}"

METRICS = (
    Metric("masked_loss", lambda: measure.scores.measure_masked_loss, lambda suite: suite.pretrained),
    Metric("score", lambda: measure.scores.measure_score, lambda suite: suite.tuned),
    Metric(
        "bag_of_words",
        lambda: measure.scores.measure_bag_of_words,
        lambda suite: [run for run in first_seeds(suite.dense) if not run.dataset.is_extractive],
        untrained=lambda run: True,
    ),
    Metric("pruned_dense", lambda: measure.scores.measure_pruned_dense, lambda suite: suite.dense),
    Metric("keep_ratio_by_layer", lambda: measure.budgets.measure_tokens_kept, lambda suite: suite.adaptive),
    Metric("slackness", lambda: measure.budgets.measure_slackness, lambda suite: suite.adaptive),
    Metric(
        "speed",
        lambda: measure.speed.measure_speed,
        lambda suite: suite.benchmarked(),
        untrained=lambda run: run.is_timed_untrained,
    ),
    # The simulations need no run.
    Metric("estimator", lambda: retention.simulations.simulate_estimator, command=SIMULATIONS),
    Metric("variance", lambda: retention.simulations.simulate_variance, command=SIMULATIONS),
    Metric("complexity", lambda: retention.simulations.simulate_complexity, command=SIMULATIONS),
)
