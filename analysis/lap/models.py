"""Names of runs, and what the report says of the models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd

from acp_repro.pipeline.paper import Item, Suite
from acp_repro.pipeline.papers.lap.suite import PruningRun

from ..published import published

PUBLISHED = published("analysis.lap")
MASKS = {
    "soft": "soft masks",
    "straight_through": "removal, straight through",
    "hard_concrete": "hard concrete gates",
}
SOFT_RATIO = "the article's $L(S)/L$; for hard concrete gates, the share of tokens that is expected to stay"
READINGS = {"published": "", "article": ", article's gate"}


def run_cells(run: PruningRun) -> dict[str, str]:
    return {
        "lambda": "no gates" if run.compression is None else f"{run.compression:g}",
        "gate": run.gate,
        "trained with": MASKS[run.training_mask] if run.compression is not None else "no gates",
        "seed": str(run.seed),
    }


def name_of(compression: float | None, training_mask: str) -> str:
    """A run in a legend or a table, from its columns."""
    if pd.isna(compression):
        return "no gates"
    return f"λ = {compression:g}, {MASKS[training_mask]}"


def each_in_words(words: Mapping[str, str]) -> str:
    """ "exact-10: 41%; soft-1, soft-3 (6 runs): 0%": runs that say the same stand together, without seeds."""
    alike: dict[str, list[str]] = {}
    for run, said in words.items():
        alike.setdefault(said, []).append(run)
    named = []
    for said, runs in alike.items():
        kinds = list(dict.fromkeys(re.sub(r"-seed\d+$", "", run) for run in runs)) if len(runs) > 1 else runs
        count = f" ({len(runs)} runs)" if len(runs) > len(kinds) else ""
        named.append(f"{', '.join(kinds)}{count}: {said}")
    return "; ".join(named)


def describe(suite: Suite) -> str:
    model, data = suite.file.model, suite.file.data
    start = f"from {model.weights}" if model.weights else "from scratch"
    return (
        f"T5 autoencoders {start}, {model.num_layers} encoder and {model.num_decoder_layers} decoder blocks "
        f"of width {model.d_model}, on {data.function.in_words(data.path)}; the decoder sees "
        f"{suite.file.pruning.decoder_window} tokens before the present one in each layer"
    )


def caveat(suite: Suite) -> str:
    if suite.file.model.weights:
        return ""
    return (
        "The article begins from Flan-T5-small's weights; these models begin from nothing, and no number "
        "here is one of the article's model."
    )


def scale(item: Item, runs: Sequence[PruningRun]) -> str:
    return "" if item.ours else "The article: Flan-T5-small (79M weights) on 700,000 Yelp reviews."


def shapes(runs: Sequence[PruningRun]) -> str:
    """The models of some runs and what they were trained with, in words."""
    models = dict.fromkeys(
        f"{model.num_layers} and {model.num_decoder_layers} blocks of width {model.d_model}, "
        + (f"from {model.weights}" if model.weights else "from scratch")
        for model in (run.model for run in runs)
    )
    masks = dict.fromkeys(run.training_mask for run in runs if run.compression is not None)
    whose = [f"{MASKS[mask]} ({'the' if mask == 'soft' else 'not the'} article's)" for mask in masks]
    return ", ".join(models) + (f", with {' or '.join(whose)}" if whose else "")


def at_paper_scale(item: Item, runs: Sequence[PruningRun]) -> bool:
    """Whether all models began from published weights, as the article's did."""
    return bool(runs) and all(run.model.weights for run in runs)
