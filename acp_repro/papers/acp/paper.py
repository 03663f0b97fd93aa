"""What the chain knows of ACP: the axes of its grid, its quantities, its figures and tables."""

from __future__ import annotations

from acp_repro.chain.paper import Item, Paper, Quantity
from acp_repro.chain.run import Run

from . import claims, text_claims
from .settings import File
from .suite import FoXSuite, make_run

_MEASURE = f"{__package__}.measure"
PRO, LLAMA = "FoX (Pro) with ACP", "FoX (LLaMA) with ACP"


def _every_run(suite: FoXSuite) -> list[Run]:
    return list(suite.runs)


def _acp_runs(suite: FoXSuite) -> list[Run]:
    return suite.select(acp=True)


def _heads_run(suite: FoXSuite) -> list[Run]:
    return [suite.heads_run]


def _sweep_run(suite: FoXSuite) -> list[Run]:
    return [suite.sweep_run]


def _pro(suite: FoXSuite) -> list[Run]:
    return suite.with_acp("pro")


def _llama(suite: FoXSuite) -> list[Run]:
    return suite.with_acp("llama")


def _pro_pairs(suite: FoXSuite) -> list[Run]:
    return suite.pairs("pro") or _pro(suite)


def _llama_pairs(suite: FoXSuite) -> list[Run]:
    return suite.pairs("llama") or _llama(suite)


def _evaluated(suite: FoXSuite) -> list[Run]:
    chosen = {*_pro_pairs(suite), *_llama_pairs(suite)}
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


def _arms(suite: FoXSuite) -> list[Run]:
    return suite.arms


def _pruned(suite: FoXSuite) -> list[Run]:
    wanted = {*_acp_runs(suite), *_arms(suite)}  # one arm trains with needles
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
_SAVINGS = ("pruned_ratio", "attention_time", "throughput")
_LOSSES = ("loss", "loss_curve")
_TASKS = ("lm_eval", "lm_eval_items")

ITEMS = (
    Item("figure1", "Attention with and without ACP", ("decay",), _heads_run),
    Item("figure2", "What ACP saves, FoX (Pro)", _SAVINGS, _pro, PRO, claims.SAVINGS, ("760M", 16384)),
    Item(
        "figure3",
        "Loss with and without ACP, FoX (Pro)",
        _LOSSES,
        lambda suite: suite.pairs("pro", True),
        "FoX (Pro) both with ACP and exact",
        claims.NO_DAMAGE,
        ("760M", 16384),
    ),
    Item(
        "figure3_right",
        "Needle in a haystack, FoX (Pro)",
        ("needle",),
        _longest_pair,
        "FoX (Pro)",
        claims.RETRIEVAL,
        ("760M", 16384),
    ),
    Item(
        "figure4", "Savings of single heads", ("pruned_ratio",), _heads_run, "", claims.HEADS, ("760M", 4096)
    ),
    Item(
        "figure5",
        "Savings of single heads in each layer",
        ("pruned_ratio",),
        _heads_run,
        "",
        claims.LAYERS,
        ("760M", 4096),
    ),
    Item(
        "figure6",
        "Decay, boundary and attention of some heads",
        ("decay", "attention_weights"),
        _heads_run,
        "",
        claims.LARGE_WEIGHTS,
        ("760M", 4096),
    ),
    Item(
        "figure7",
        "Savings against epsilon",
        ("epsilon_sweep",),
        _sweep_run,
        "",
        claims.EPSILON,
        ("125M", 16384),
    ),
    Item(
        "figure8",
        "Loss with and without ACP, further sizes of FoX (Pro)",
        _LOSSES,
        lambda suite: suite.pairs("pro", False),
        "a second size of FoX (Pro) both with ACP and exact",
        claims.NO_DAMAGE,
        ("360M", 16384),
    ),
    Item(
        "figure9",
        "Needle in a haystack, shorter contexts of FoX (Pro)",
        ("needle",),
        _shorter_pairs,
        "FoX (Pro) at a second context length, shorter",
        claims.RETRIEVAL,
        ("760M", 8192),
    ),
    Item("figure10", "What ACP saves, FoX (LLaMA)", _SAVINGS, _llama, LLAMA, claims.SAVINGS, ("760M", 16384)),
    Item(
        "figure11",
        "Loss with and without ACP, FoX (LLaMA)",
        _LOSSES,
        lambda suite: suite.pairs("llama"),
        "FoX (LLaMA) both with ACP and exact",
        claims.NO_DAMAGE,
        ("760M", 16384),
    ),
    Item(
        "figure11_right",
        "Needle in a haystack, FoX (LLaMA)",
        ("needle",),
        _llama_pair,
        "FoX (LLaMA)",
        claims.RETRIEVAL,
        ("760M", 16384),
    ),
    Item(
        "table1", "LM evaluation harness, FoX (Pro)", _TASKS, _pro_pairs, PRO, claims.TASKS, ("760M", 16384)
    ),
    Item("table2", "Sizes"),
    Item(
        "table3",
        "LM evaluation harness, FoX (LLaMA)",
        _TASKS,
        _llama_pairs,
        LLAMA,
        claims.TASKS,
        ("760M", 16384),
    ),
    Item(
        "table4",
        "Time spent on the boundary search",
        ("attention_time",),
        _pro,
        PRO,
        claims.SEARCH,
        ("760M", 16384),
    ),
    Item(
        "figureA1",
        "Pruned mass of every head against the bound",
        ("pruned_mass",),
        _sweep_run,
        claims=claims.BOUND,
        ours=True,
    ),
    Item(
        "figureA2",
        "What the size of blocks costs",
        ("block_size",),
        _sweep_run,
        claims=claims.BLOCKS,
        ours=True,
    ),
    Item(
        "figureA3",
        "Contexts longer than in training",
        ("long_context",),
        _sweep_run,
        claims=claims.LONG_CONTEXT,
        ours=True,
    ),
    Item(
        "figureA4",
        "Loss at each position far past the training length",
        ("long_loss_curve",),
        _longest_pair,
        "FoX (Pro) with ACP",
        ours=True,
    ),
    Item(
        "figureA5",
        "Pruned share and loss against tokens trained",
        ("training_log",),
        _longest_trained,
        "FoX (Pro) with ACP that it trains",
        paper_model=("125M", 16384),
        ours=True,
    ),
    Item(
        "figureA6",
        "Needle in a haystack, trained with needles",
        ("needle",),
        _trained_with_needles,
        "a pair that trains with needles (needle_share), with ACP and exact",
        claims.RETRIEVAL_TRAINED,
        ours=True,
    ),
    Item(
        "tableA1",
        "Every pair trained with needles",
        ("needle",),
        _trained_with_needles,
        "a pair that trains with needles (needle_share), with ACP and exact",
        ours=True,
    ),
    Item(
        "figureA7",
        "What moves the pruned share",
        ("pruned_ratio",),
        _arms,
        "trainings with ACP that differ in learning rate, words, text or QK-norm",
        ours=True,
    ),
    Item(
        "figure_kernel",
        "Speed of the kernels",
        ("kernel_time",),
        ours=True,
        extra=True,
        aliases=("figure-kernel",),
    ),
    Item(
        "figure_scaling",
        "Training on several GPUs",
        ("training_step",),
        ours=True,
        extra=True,
        aliases=("figure-scaling",),
    ),
    Item(
        "figure_decode",
        "Time and memory of a decoding step",
        ("decode_time",),
        ours=True,
        extra=True,
        aliases=("figure-decode",),
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
    items=ITEMS,
    task=f"{__package__}.task:FoXTask",
    analysis="analysis.acp",
    plan=f"{__package__}.plan",
    claims=text_claims.CLAIMS,
)
