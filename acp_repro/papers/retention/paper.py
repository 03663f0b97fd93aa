"""What the chain knows of Adaptive Retention: its grid, its quantities, its tables and figures."""

from __future__ import annotations

from acp_repro.chain.paper import Item, Paper, Quantity
from acp_repro.chain.run import Run

from . import claims
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


def _schedules(blocks: int | None):
    def runs(suite: RetentionSuite) -> list[Run]:
        """One run of each budget: the schedules depend on nothing else."""
        of_budget: dict[float, Run] = {}
        for run in suite.adaptive:
            layers = run.backbone.num_hidden_layers
            if blocks == layers or (blocks is None and layers != 12):
                of_budget.setdefault(run.budget, run)
        return list(of_budget.values())

    return runs


_PRUNED = "a dense model and pruned ones at this budget"

ITEMS = (
    Item(
        "table1",
        "Results at 50 % of the tokens",
        ("score",),
        lambda s: s.of_table(0.5),
        _PRUNED,
        claims.RESULTS,
    ),
    Item(
        "table2",
        "Results at 30 % of the tokens",
        ("score",),
        lambda s: s.of_table(0.3),
        _PRUNED,
        claims.RESULTS,
    ),
    Item("table3", "Ablations", ("score", "speed"), lambda s: s.ablations(), "an ablation", claims.ABLATIONS),
    Item("table4", "Compute cost", ("speed",), lambda s: s.timed(), "", claims.SPEED),
    Item(
        "table5",
        "Tokens kept in each layer",
        ("tokens_kept",),
        _schedules(None),
        "Adaptive Retention in an encoder of another depth than 12",
        claims.BUDGET,
    ),
    Item(
        "table6",
        "Tokens kept in each of 12 layers",
        ("tokens_kept",),
        _schedules(12),
        "Adaptive Retention in an encoder of 12 blocks",
        claims.BUDGET,
    ),
    Item(
        "figure2",
        "Temperature and stretch",
        ("score",),
        lambda s: s.sweeps(),
        "Adaptive Retention at several temperatures or stretches",
        claims.SWEEPS,
    ),
    Item(
        "figure_gates",
        "Where the gate stands",
        ("pruned_dense",),
        lambda s: s.dense,
        "a dense model",
        ours=True,
    ),
    Item(
        "figureC",
        "Slack of the budget",
        ("slackness",),
        lambda s: s.adaptive,
        "Adaptive Retention",
        claims.SLACKNESS,
        ours=True,
    ),
    Item("figureD", "Bias of the relaxed gradient", ("estimator",), claims=claims.BIAS, ours=True),
    Item("figureE", "Variance of the gradient", ("variance",), claims=claims.VARIANCE, ours=True),
    Item("figureH", "Complexity of a pruned class", ("complexity",), claims=claims.COMPLEXITY, ours=True),
    Item("tableI", "FLOPs and time", ("speed",), lambda s: s.timed(), "", claims.COST, ours=True),
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
    items=ITEMS,
    task=f"{__package__}.task:task_of",
    steps=f"{__package__}.texts:steps_of",
    analysis="analysis.retention",
)
