"""Every metric of ACP: its columns, the runs that it is measured on, and the function that measures it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from acp_repro.pipeline.paper import Metric, samples

from . import measure
from .runs import FoXRun, FoXSuite

HARNESS = ("lm_eval", "eval")
NEEDLE = (
    "method",
    "mode",
    "haystack",
    "needle_fraction",
    "evaluated_length_tokens",
    "depth",
    "haystack_sample",
    "answer_tokens",
    "answer_recall",
    "exact_match",
    "answer_log_likelihood_nats",
    "answer_log_likelihood_without_needle_nats",
    "answer",
    "fact",
)


SAME_WEIGHTS = (
    "test",
    "items",
    "differing_items",
    "largest_difference_nats",
    "mean_difference_nats",
    "differing_answers",
)


def of_model(
    function: Callable[[], Callable[..., Any]], tokens: str, rows: int | None = None
) -> Callable[[], Callable[..., Any]]:
    """``Metric.measure`` of a function of (model, batches, settings); see ``TrainedFoX.on_heldout``."""

    def measure_run(trained: Any) -> list[dict[str, Any]]:
        return trained.on_heldout(function(), tokens, rows)

    return lambda: measure_run


def pruning(suite: FoXSuite) -> list[FoXRun]:
    """Every run with ACP, also those that train with needles or from a changed weight."""
    return [run for run in suite.runs if run.log_pruning_tolerance is not None]


def with_acp(suite: FoXSuite) -> list[FoXRun]:
    return suite.select(acp=True)


def run_for_sweep(suite: FoXSuite) -> list[FoXRun]:
    return [suite.run_for_sweep]


def run_for_heads(suite: FoXSuite) -> list[FoXRun]:
    return [suite.run_for_heads]


def evaluated(suite: FoXSuite) -> list[FoXRun]:
    return suite.union(suite.evaluated("pro"), suite.evaluated("llama"), suite.rope_baselines)


def needle_runs(suite: FoXSuite) -> list[FoXRun]:
    """The runs of Figures 3, 9, 11 and A6 and of Table A1."""
    longest, shorter = (suite.needle_runs("pro", longest=longest) for longest in (True, False))
    return suite.union(longest, shorter, suite.needle_runs("llama", longest=True), suite.needle_trainings)


METRICS = (
    Metric(
        "pruned_ratio",
        (
            "layer",
            "head",
            "measured_tokens",
            "block_q_tokens",
            "block_k_tokens",
            "pruned_blocks",
            "causal_blocks",
            "pruned_ratio",
        ),
        of_model(lambda: measure.pruned_ratio.measure_pruned_ratio, "pruned_ratio_tokens"),
        lambda suite: suite.union(suite.select(acp=True), suite.ablations),  # one arm trains with needles
    ),
    Metric(
        "attention_time",
        (
            "implementation",
            "method",
            "measured_tokens",
            "repeats",
            *samples("forward_ms"),
            *samples("backward_ms"),
            "boundary_search_ms",
            "order",
        ),
        lambda: measure.speed.measure_attention_time,
        with_acp,
    ),
    Metric(
        "throughput",
        (
            "implementation",
            "method",
            "measured_tokens",
            "repeats",
            "throughput_tokens_per_s",
            *samples("pass_ms"),
            "order",
        ),
        lambda: measure.speed.measure_throughput,
        with_acp,
    ),
    Metric(
        "throughput_with_checkpointing",
        (
            "implementation",
            "method",
            "measured_tokens",
            "repeats",
            "throughput_tokens_per_s",
            *samples("pass_ms"),
            "order",
        ),
        lambda: measure.speed.measure_throughput_with_checkpointing,
        with_acp,
        optional=True,
    ),
    Metric(
        "loss_curve",
        ("position", "window_tokens", "measured_tokens", "loss_nats"),
        lambda: measure.losses.measure_loss_curve,
        large=True,
    ),
    Metric("loss", ("measured_tokens", "loss_nats"), lambda: measure.losses.measure_loss),
    Metric(
        "decay",  # c of Section 2
        (
            "layer",
            "head",
            "pruned_ratio",
            "position",
            "cumulative_log_fgate_nats",
            "threshold_nats",
            "block_q_tokens",
            "block_k_tokens",
            "first_kept_key_position",
        ),
        lambda: measure.heads.measure_decay,
        run_for_heads,
        large=True,
    ),
    Metric(
        "attention_weights",
        ("layer", "head", "query_position", "key_position", "attention_weight"),
        lambda: measure.heads.measure_attention_weights,
        run_for_heads,
        large=True,
    ),
    Metric(
        "epsilon_sweep",
        (
            "swept_log_pruning_tolerance",
            "block_pruned_ratio",
            "token_pruned_ratio",
            "loss_nats",
            "largest_pruned_mass",
            "measured_tokens",
        ),
        of_model(lambda: measure.pruned_ratio.measure_epsilon_sweep, "sweep_tokens"),
        run_for_sweep,
    ),
    Metric(
        "pruned_mass",  # sums of attention weights, between 0 and 1
        (
            "layer",
            "head",
            "measured_rows",
            "rows_with_pruning",
            "threshold_nats",
            "pruned_ratio",
            "largest_pruned_mass",
            "q99_pruned_mass",
            "q90_pruned_mass",
            "median_pruned_mass",
            "threshold_slack_nats",
        ),
        of_model(lambda: measure.pruned_mass.measure_pruned_mass, "sweep_tokens"),
        run_for_sweep,
    ),
    Metric(
        "block_size",
        ("block_tokens", "measured_tokens", "pruned_ratio"),
        of_model(lambda: measure.pruned_ratio.measure_block_size, "sweep_tokens"),
        run_for_sweep,
    ),
    Metric(
        "eviction",
        (
            "policy",
            "treatment",
            "prompt_tokens",
            "position",
            "measured_tokens",
            "kept_bytes",
            "full_bytes",
            "loss_nats",
            "loss_increase_nats",
            "largest_loss_increase_nats",
        ),
        of_model(lambda: measure.eviction.measure_eviction, "sweep_tokens", rows=1),
        lambda suite: run_for_sweep(suite) if suite.weights else [],  # of a suite whose weights are ready
        optional=True,
    ),
    Metric(
        "lm_eval",
        (
            "task",
            "metric",
            "value",
            "standard_error",
            "items",
            "truncated_requests",
            "source",
            "harness_version",
            "begins_with_bos",
        ),
        lambda: measure.lm_eval.measure_lm_eval,
        evaluated,
        library=HARNESS,
    ),
    Metric(
        "lm_eval_items",
        ("task", "metric", "item", "value", "weight"),
        lambda: measure.lm_eval.measure_lm_eval_items,
        evaluated,
        library=HARNESS,
        large=True,
    ),
    Metric("needle", NEEDLE, lambda: measure.needle.measure_needle, needle_runs, large=True),
    Metric(
        "needle_facts",
        NEEDLE,
        lambda: measure.needle.measure_needle_facts,
        lambda suite: suite.needle_trainings,
        large=True,
        optional=True,
    ),
    Metric("same_weights", SAME_WEIGHTS, lambda: measure.losses.measure_same_weights, pruning),
    Metric(
        "same_weights_tasks",
        SAME_WEIGHTS,
        lambda: measure.lm_eval.measure_same_weights_tasks,
        pruning,
        library=HARNESS,
        optional=True,
    ),
    Metric(
        "training_log",
        (
            "step",
            "tokens",
            "layer",
            "pruned_ratio",
            "loss_nats",
            "averaged_steps",
            "training_device",
            "throughput_tokens_per_s",
        ),
        lambda: measure.losses.measure_training_log,
        lambda suite: suite.union(suite.longest_trained, suite.longest_trained and suite.with_acp("pro")),
    ),
    Metric(
        "step_losses",
        ("step", "tokens", "loss_nats", "grad_norm"),
        lambda: measure.losses.measure_step_losses,
        lambda suite: [] if suite.weights else list(suite.runs),  # ready weights have no log
        large=True,
        optional=True,
    ),
    Metric(
        "kernel_time",  # nominal counts the whole causal grid
        (
            "implementation",
            "method",
            "gates",
            "length_tokens",
            "heads",
            "head_dim",
            "measured_tokens",
            "repeats",
            "pruned_ratio",
            *samples("forward_ms"),
            *samples("forward_backward_ms"),
            *samples("search_ms"),
            "nominal_forward_tflop",
            "nominal_forward_backward_tflop",
            "gate_gradient_error",
            *samples("forward_host_ms"),
            *samples("forward_backward_host_ms"),
            "order",
        ),
        key=("implementation", "method", "length_tokens", "heads", "head_dim"),
        command="python -m acp_repro.benchmark_attention --suite {suite}",
    ),
    Metric(  # bytes are sums over ranks, but for the most that one rank receives forward
        "context_parallel",
        (
            "implementation",
            "exchange",
            "method",
            "gates",
            "length_tokens",
            "heads",
            "head_dim",
            "ranks",
            "repeats",
            "order",
            "pruned_ratio",
            *samples("forward_ms"),
            *samples("forward_backward_ms"),
            "gates_bytes",
            "forward_bytes",
            "backward_bytes",
            "most_received_bytes",
            "difference",
        ),
        key=("implementation", "exchange", "method", "length_tokens", "heads", "head_dim", "ranks"),
        command="python -m acp_repro.benchmark_attention --nproc 2 --suite {suite}",
    ),
    Metric(
        "forward_time",  # error_budgets is of ours, published_us of FlagAttention on an H100
        (
            "implementation",
            "dtype_of_inputs",
            "batch",
            "queries",
            "keys",
            "heads",
            "head_dim",
            "repeats",
            "order",
            *samples("forward_ms"),
            "error_budgets",
            "published_us",
        ),
        key=("implementation", "dtype_of_inputs", "batch", "queries", "keys", "heads", "head_dim"),
        command="python -m acp_repro.benchmark_attention --inference --suite {suite}",
    ),
    Metric(
        "training_step",
        (
            "implementation",
            "method",
            "vocab_size",
            "ranks",
            "parallel",
            "step_tokens",
            "steps",
            "repeats",
            *samples("step_ms"),
            "throughput_tokens_per_s",
            "mfu_nominal",
            "peak_memory_bytes",
            "pruned_ratio",
            "order",
        ),
        key=(
            "architecture",
            "size",
            "context_length_tokens",
            "implementation",
            "method",
            "vocab_size",
            "ranks",
            "parallel",
        ),
        command="python -m acp_repro.benchmark_training --suite {suite}",
    ),
    Metric(
        "first_divergence",
        (
            "training",
            "training_log_pruning_tolerance",
            "step",
            "tokens",
            "loss_nats",
            "loss_difference_nats",
            "differing_gradients",
            "gradient_difference",
            "gradient_norm_difference",
            "most_different_gradient",
            "parameter_difference",
            "diverges_here",
            "pruned_ratio",
            "largest_pruned_mass",
        ),
        lambda: measure.first_divergence.measure_first_divergence,
        lambda suite: sorted(suite.runs, key=lambda run: run.log_pruning_tolerance is not None)[:1],
        untrained=lambda run: True,
        large=True,
        optional=True,
    ),
    Metric(
        # The cache is measured as it is, for each head, and as one block table for all heads of a layer.
        "decode_time",
        (
            "scope",
            "implementation",
            "method",
            "gates",
            "batch",
            "length_tokens",
            "layers",
            "heads",
            "head_dim",
            "repeats",
            *samples("step_ms"),
            "read_ms",
            *samples("prefill_ms"),
            "kept_bytes",
            "layer_kept_bytes",
            "allocated_bytes",
            "peak_bytes",
            "output_error",
            "order",
        ),
        key=("scope", "implementation", "method", "batch", "length_tokens", "heads", "head_dim"),
        command="python -m acp_repro.benchmark_decode --suite {suite}",
    ),
)
