"""What the chain knows of LAP: the axes of its grid, its quantities, its figures and tables."""

from __future__ import annotations

from acp_repro.chain.paper import Item, Paper, Quantity
from acp_repro.chain.run import Run

from . import claims
from .settings import File
from .suite import PruningSuite, make_run

_MEASURE = f"{__package__}.measure"


def _every_run(suite: PruningSuite) -> list[Run]:
    return list(suite.runs)


def _gated(suite: PruningSuite) -> list[Run]:
    return suite.gated


def _main(suite: PruningSuite) -> list[Run]:
    return [suite.main_run]


def _probed(suite: PruningSuite) -> list[Run]:
    """The main run, where its texts have labels."""
    return [suite.main_run] if suite.file.data.sides else []


def _quantity(name: str, columns: str, runs=_every_run, **facts) -> Quantity:
    return Quantity(name, tuple(columns.split()), f"{_MEASURE}.{name}", runs, **facts)


# Accuracies, ratios, BLEU and ROUGE are shares, 0 to 1.
QUANTITIES = (
    _quantity("dynamics", "step loss_nats series gate_index value"),
    _quantity(
        "reconstruction",
        "decoding measured_texts kept_ratio token_accuracy bleu rouge_l exact_match edits_per_token",
    ),
    _quantity(
        "probe", "classifier vectors_per_text train_texts measured_texts accuracy larger_class", _probed
    ),
    _quantity(
        "attribution",
        "text text_tokens kept_position kept_token written_position written_token matches_text shap_nats",
        _main,
        large=True,
    ),
    _quantity("kept_words", "grouping group tokens kept_tokens", _main),
    _quantity(
        "removal_time",
        "method length_tokens measured_texts repeats kept_ratio encoder_ms decoder_ms encoder_peak_bytes "
        "decoder_peak_bytes memory_bytes order",
        _main,
        timed=True,
        later=("order",),
    ),
)

ITEMS = (
    Item("figure_dynamics", "Training dynamics", ("dynamics",), _main, claims=claims.DYNAMICS),
    Item(
        "table_scores",
        "Accuracy, BLEU and ROUGE on held-out text, soft, removed and free",
        ("reconstruction",),
        _every_run,
        claims=claims.SCORES,
    ),
    Item(
        "figure_probing",
        "Probing classifier against its baselines",
        ("probe",),
        _probed,
        "texts with labels",
        claims.PROBING,
    ),
    Item("figure_shap", "Which vector each written word comes from", ("attribution",), _main),
    Item(
        "figure_curve",
        "Accuracy against compression, soft and removed",
        ("reconstruction",),
        _gated,
        "gates",
        claims.CURVE,
        ours=True,
    ),
    Item(
        "figure_slices",
        "How far from its origin a vector's attribution reaches",
        ("attribution",),
        _main,
        claims=claims.SHAP,
        ours=True,
    ),
    Item("figure_words", "Which tokens are kept", ("kept_words",), _main, ours=True),
    Item("figure_savings", "What removal saves", ("removal_time",), _main, claims=claims.SAVINGS, ours=True),
)

PAPER = Paper(
    name="lap",
    title="Learnable Attention Pruning",
    url="https://github.com/ATMI/Megatoken",
    file=File,
    suite=PruningSuite,
    axes=("compression", "gate", "training_mask", "seed"),
    make_run=make_run,
    run_columns=("compression", "gate", "training_mask", "seed"),
    quantities=QUANTITIES,
    items=ITEMS,
    task=f"{__package__}.task:PruningTask",
    analysis="analysis.lap",
)
