"""The metrics of ACP: for each metric the function that measures it and the runs that it is measured on."""

import functools
from collections.abc import Callable
from typing import Any

from acp_repro.pipeline import benchmark
from acp_repro.pipeline.paper import Metric

from . import measure
from .runs import FoXRun, FoXSuite

HARNESS = ("lm_eval", "eval")


def of_model(
    function: Callable[[], Callable[..., Any]], tokens: str, rows: int | None = None
) -> Callable[[], Callable[..., Any]]:
    """``Metric.measure`` of a function of (model, batches, settings); see ``TrainedFoX.on_heldout``."""

    def load() -> Callable[..., Any]:
        measure_model = function()

        @functools.wraps(measure_model)
        def measure_run(trained: Any) -> list[dict[str, Any]]:
            return trained.on_heldout(measure_model, tokens, rows)

        return measure_run

    return load


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
        of_model(lambda: measure.pruned_ratio.measure_pruned_ratio, "pruned_ratio_tokens"),
        lambda suite: suite.union(suite.select(acp=True), suite.ablations),  # one of them trains with needles
    ),
    Metric("attention_time", lambda: measure.speed.measure_attention_time, with_acp),
    Metric("throughput", lambda: measure.speed.measure_throughput, with_acp),
    Metric(
        "throughput_with_checkpointing",
        lambda: measure.speed.measure_throughput_with_checkpointing,
        with_acp,
        optional=True,
    ),
    Metric("loss_curve", lambda: measure.losses.measure_loss_curve, large=True),
    Metric("loss", lambda: measure.losses.measure_loss),
    Metric("decay", lambda: measure.heads.measure_decay, run_for_heads, large=True),
    Metric("attention_weights", lambda: measure.heads.measure_attention_weights, run_for_heads, large=True),
    Metric(
        "epsilon_sweep",
        of_model(lambda: measure.pruned_ratio.measure_epsilon_sweep, "sweep_tokens"),
        run_for_sweep,
    ),
    Metric(
        "pruned_mass",
        of_model(lambda: measure.pruned_mass.measure_pruned_mass, "sweep_tokens"),
        run_for_sweep,
    ),
    Metric(
        "block_size", of_model(lambda: measure.pruned_ratio.measure_block_size, "sweep_tokens"), run_for_sweep
    ),
    Metric(
        "eviction", of_model(lambda: measure.eviction.measure_eviction, "sweep_tokens", rows=1), run_for_sweep
    ),
    Metric("lm_eval", lambda: measure.lm_eval.measure_lm_eval, evaluated, library=HARNESS),
    Metric(
        "lm_eval_items", lambda: measure.lm_eval.measure_lm_eval_items, evaluated, library=HARNESS, large=True
    ),
    Metric("needle", lambda: measure.needle.measure_needle, needle_runs, large=True),
    Metric(
        "needle_facts",
        lambda: measure.needle.measure_needle_facts,
        lambda suite: suite.needle_trainings,
        large=True,
        optional=True,
    ),
    Metric("same_weights", lambda: measure.losses.measure_same_weights, pruning),
    Metric(
        "same_weights_tasks",
        lambda: measure.lm_eval.measure_same_weights_tasks,
        pruning,
        library=HARNESS,
        optional=True,
    ),
    Metric(
        "training_log",
        lambda: measure.losses.measure_training_log,
        lambda suite: suite.union(suite.longest_trained, suite.longest_trained and suite.with_acp("pro")),
    ),
    Metric(
        "step_losses",
        lambda: measure.losses.measure_step_losses,
        lambda suite: [] if suite.weights else list(suite.runs),  # ready weights have no log
        large=True,
        optional=True,
    ),
    Metric(
        "kernel_time",
        lambda: benchmark.attention.time_baselines,
        key=("implementation", "method", "length_tokens", "heads", "head_dim"),
        command="python -m acp_repro.benchmark_attention --suite {suite}",
    ),
    Metric(
        "context_parallel",
        lambda: benchmark.context_parallel.time_exchanges,
        key=("implementation", "exchange", "method", "length_tokens", "heads", "head_dim", "ranks"),
        command="python -m acp_repro.benchmark_attention --nproc 2 --suite {suite}",
    ),
    Metric(
        "forward_time",
        lambda: benchmark.forward.time_forward,
        key=("implementation", "dtype_of_inputs", "batch", "queries", "keys", "heads", "head_dim"),
        command="python -m acp_repro.benchmark_attention --inference --suite {suite}",
    ),
    Metric(
        "training_step",
        lambda: measure.training_steps.time_steps,
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
        lambda: measure.first_divergence.measure_first_divergence,
        lambda suite: sorted(suite.runs, key=lambda run: run.log_pruning_tolerance is not None)[:1],
        untrained=lambda run: True,
        large=True,
        optional=True,
    ),
    Metric(
        "decode_time",
        lambda: benchmark.decode.measure_model,
        key=("scope", "implementation", "method", "batch", "length_tokens", "heads", "head_dim"),
        command="python -m acp_repro.benchmark_decode --suite {suite}",
    ),
)
