"""What the chain knows of LAP: the axes of its grid, its quantities, and the contents of its analysis."""

from __future__ import annotations

from acp_repro.chain.paper import Paper, Quantity
from acp_repro.chain.run import Run

from .settings import File
from .suite import PruningSuite, make_run

_MEASURE = f"{__package__}.measure"


def _every_run(suite: PruningSuite) -> list[Run]:
    return list(suite.runs)


def _main(suite: PruningSuite) -> list[Run]:
    return [suite.main_run]


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
        "probe",
        "classifier vectors_per_text train_texts measured_texts accuracy larger_class",
        lambda suite: suite.probed,
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
    contents=(
        *("figure_dynamics", "table_scores", "figure_probing", "figure_shap"),
        *("figure_curve", "figure_slices", "figure_words", "figure_savings"),
    ),
    task=f"{__package__}.task:PruningTask",
    analysis="analysis.lap",
)
