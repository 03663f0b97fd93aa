"""What the chain knows of ACP: the axes of its grid, its quantities, and the contents of its analysis."""

from __future__ import annotations

from acp_repro.chain.paper import Paper, Quantity
from acp_repro.chain.run import Run

from .settings import File
from .suite import FoXSuite, make_run

_MEASURE = f"{__package__}.measure"


def _every_run(suite: FoXSuite) -> list[Run]:
    return list(suite.runs)


def _acp_runs(suite: FoXSuite) -> list[Run]:
    return suite.select(acp=True)


def _heads_run(suite: FoXSuite) -> list[Run]:
    return [suite.heads_run]


def _sweep_run(suite: FoXSuite) -> list[Run]:
    return [suite.sweep_run]


def _evaluated(suite: FoXSuite) -> list[Run]:
    chosen = {*suite.evaluated("pro"), *suite.evaluated("llama")}
    return [run for run in suite.runs if run in chosen]


def _longest_pair(suite: FoXSuite) -> list[Run]:
    return suite.needle_runs("pro", longest=True)


def _shorter_pairs(suite: FoXSuite) -> list[Run]:
    return suite.needle_runs("pro", longest=False)


def _llama_pair(suite: FoXSuite) -> list[Run]:
    return suite.needle_runs("llama", longest=True)


def _trained_with_needles(suite: FoXSuite) -> list[Run]:
    return suite.trained_with_needles


def _needle_runs(suite: FoXSuite) -> list[Run]:
    wanted = (_longest_pair, _shorter_pairs, _llama_pair, _trained_with_needles)
    runs = [run for some in wanted for run in some(suite)]
    return [run for run in suite.runs if run in runs]


def _pruned(suite: FoXSuite) -> list[Run]:
    wanted = {*_acp_runs(suite), *suite.arms}  # one arm trains with needles
    return [run for run in suite.runs if run in wanted]


def _longest_trained(suite: FoXSuite) -> list[Run]:
    return suite.longest_trained


def _quantity(name: str, columns: str, runs=_every_run, **facts) -> Quantity:
    return Quantity(name, tuple(columns.split()), f"{_MEASURE}.{name}", runs, **facts)


def _benchmark(
    name: str, columns: str, module: str, later: str = "order", timed: bool = True, **facts
) -> Quantity:
    command = f"python -m acp_repro.{module} --suite {{suite}}"
    names = (*columns.split(), *later.split())
    return Quantity(name, names, timed=timed, command=command, later=tuple(later.split()), **facts)


_NEEDLE = (
    "method mode haystack needle_share evaluated_length_tokens depth haystack_sample answer_tokens "
    "answer_recall exact_match answer_log_likelihood_nats answer_log_likelihood_without_needle_nats answer"
)
_HARNESS = ("lm_eval", "eval")  # the library and our extra

# "decay" is c of Section 2; masses are sums of attention weights, between 0 and 1; "nominal" is of the whole
# causal grid, pruned or not.
QUANTITIES = (
    _quantity(
        "pruned_ratio",
        "layer head measured_tokens block_q_tokens block_k_tokens pruned_blocks causal_blocks pruned_ratio",
        _pruned,
    ),
    _quantity(
        "attention_time",
        "implementation method measured_tokens repeats forward_ms backward_ms boundary_search_ms order",
        _acp_runs,
        group="speed",
        timed=True,
        later=("order",),
    ),
    _quantity(
        "throughput",
        "implementation method measured_tokens repeats throughput_tokens_per_s order",
        _acp_runs,
        group="speed",
        timed=True,
        later=("order",),
    ),
    _quantity("loss_curve", "position window_tokens measured_tokens loss_nats", group="losses", large=True),
    _quantity("loss", "measured_tokens loss_nats", group="losses"),
    _quantity(
        "decay",
        "layer head pruned_ratio position cumulative_log_fgate_nats threshold_nats block_q_tokens "
        "block_k_tokens first_kept_key_position",
        _heads_run,
        group="heads",
        large=True,
        options=("heads",),
    ),
    _quantity(
        "attention_weights",
        "layer head query_position key_position attention_weight",
        _heads_run,
        group="heads",
        large=True,
        options=("heads",),
    ),
    _quantity(
        "epsilon_sweep",
        "swept_log_pruning_tolerance block_pruned_ratio token_pruned_ratio loss_nats largest_pruned_mass "
        "measured_tokens",
        _sweep_run,
    ),
    _quantity(
        "pruned_mass",
        "layer head measured_rows rows_with_pruning threshold_nats pruned_ratio largest_pruned_mass "
        "q99_pruned_mass q90_pruned_mass median_pruned_mass threshold_slack_nats",
        _sweep_run,
    ),
    _quantity("block_size", "block_tokens measured_tokens pruned_ratio", _sweep_run),
    _quantity("long_context", "evaluated_length_tokens measured_tokens pruned_ratio loss_nats", _sweep_run),
    _quantity(
        "lm_eval",
        "task metric value standard_error items truncated_requests source harness_version begins_with_bos",
        _evaluated,
        group="lm_eval",
        library=_HARNESS,
        later=("begins_with_bos",),
    ),
    # For paired tests: of each item whether it is right, or its log-likelihood in nats over `weight` words.
    _quantity(
        "lm_eval_items",
        "task metric item value weight",
        _evaluated,
        group="lm_eval",
        library=_HARNESS,
        large=True,
    ),
    _quantity(
        "long_loss_curve",
        "method evaluated_length_tokens position window_tokens measured_tokens loss_nats",
        _longest_pair,
        large=True,
    ),
    _quantity("needle", f"{_NEEDLE} fact", _needle_runs, large=True, later=("fact",)),
    # Asked for two dozen facts instead of one, and of weights trained with ACP without pruning, too.
    _quantity("needle_facts", f"{_NEEDLE} fact", _trained_with_needles, large=True),
    _quantity(
        "training_log",
        "step tokens layer pruned_ratio loss_nats averaged_steps training_device throughput_tokens_per_s",
        _longest_trained,
        later=("throughput_tokens_per_s",),
    ),
    _quantity("step_losses", "step tokens loss_nats grad_norm", _trained_with_needles, large=True),
    _benchmark(
        "kernel_time",
        "implementation method gates length_tokens heads head_dim measured_tokens repeats pruned_ratio "
        "forward_ms forward_backward_ms search_ms nominal_forward_tflop nominal_forward_backward_tflop "
        "gate_gradient_error",
        "benchmark_attention",
        "forward_host_ms forward_backward_host_ms order",
    ),
    _benchmark(
        "training_step",
        "implementation method vocab_size ranks parallel step_tokens steps repeats step_ms "
        "throughput_tokens_per_s mfu_nominal peak_memory_bytes pruned_ratio",
        "benchmark_training",
    ),
    # Trainings side by side, each step compared with the exact one; see papers/acp/fork.py.
    _benchmark(
        "fork",
        "training training_log_pruning_tolerance step tokens loss_nats loss_difference_nats "
        "differing_gradients gradient_difference gradient_norm_difference most_different_gradient "
        "weight_difference parts_here pruned_ratio largest_pruned_mass",
        "fork",
        later="",
        timed=False,
        large=True,
    ),
    # One decoding step of attention alone or of a whole model (`scope`); what it keeps for each head, and
    # what a block table shared by a layer's heads would keep.
    _benchmark(
        "decode_time",
        "scope implementation method gates batch length_tokens layers heads head_dim repeats step_ms read_ms "
        "prefill_ms kept_bytes layer_kept_bytes allocated_bytes peak_bytes output_error",
        "benchmark_decode",
    ),
)

PAPER = Paper(
    name="acp",
    title="Adaptive Computation Pruning for the Forgetting Transformer",
    url="https://arxiv.org/abs/2504.06949",
    file=File,
    suite=FoXSuite,
    axes=(
        "architecture",
        "size",
        "context_length",
        "log_pruning_tolerance",
        "seed",
        "needle_share",
        "nudged",
    ),
    make_run=make_run,
    run_columns=("architecture", "size", "context_length_tokens", "log_pruning_tolerance", "seed"),
    quantities=QUANTITIES,
    contents=(
        *("figure1", "figure2", "figure3", "figure3_right", "figure4", "figure5", "figure6", "figure7"),
        *("figure8", "figure9", "figure10", "figure11", "figure11_right"),
        *("table1", "table2", "table3", "table4"),
        *("figureA1", "figureA2", "figureA3", "figureA4", "figureA5", "figureA6", "tableA1", "figureA7"),
        *("figure_kernel", "figure_scaling", "figure_decode"),
    ),
    task=f"{__package__}.task:FoXTask",
    analysis="analysis.acp",
    plan=f"{__package__}.plan",
)
