"""The names of runs and models in tables, figures and the report."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from acp_repro.lap.config import PruningConfig
from acp_repro.papers.lap.runs import PruningRun
from acp_repro.papers.lap.schema import File
from acp_repro.pipeline.paper import FigureSpec, Suite
from acp_repro.pipeline.suite_file import load_suite

from ..published import published
from ..verdict import Verdict, Word

PUBLISHED = published("analysis.lap")
ARTICLE = "The article has soft masks, beta 5, tau 0.1, and lambda from step 500"
MASKS = {
    "soft": "soft masks",
    "straight_through": "removal with a straight-through gradient",
    "hard_concrete": "hard concrete gates",
}
SOFT_RATIO = (
    "the article's $L(S)/L$ (for hard concrete gates: the share expected under the noise of training)"
)
MOST_KEPT = 0.95  # the keep ratio up to which a run counts as dropping tokens
READINGS = {"published": "", "article": ", article's gate"}


def run_cells(run: PruningRun) -> dict[str, str]:
    return {
        "lambda": "no gates" if run.compression is None else f"{run.compression:g}",
        "gate": run.gate,
        "trained with": MASKS[run.training_mask] if run.compression is not None else "no gates",
        "seed": str(run.seed),
    }


def name_of(compression: float | None, training_mask: str) -> str:
    """The name of a run in a legend or a table, from its columns."""
    if pd.isna(compression):
        return "no gates"
    return f"λ = {compression:g}, {MASKS[training_mask]}"


def each_in_words(words: Mapping[str, str]) -> str:
    """ "exact-10: 41%; soft-1, soft-3 (6 runs): 0%": runs with the same text are listed together."""
    alike: dict[str, list[str]] = {}
    for run, text in words.items():
        alike.setdefault(text, []).append(run)
    named = []
    for text, runs in alike.items():
        kinds = list(dict.fromkeys(re.sub(r"-seed\d+$", "", run) for run in runs))
        count = f" ({len(runs)} runs)" if len(runs) > len(kinds) else ""
        named.append(f"{', '.join(kinds if len(runs) > 1 else runs)}{count}: {text}")
    return "; ".join(named)


def describe(suite: Suite) -> str:
    model, data = suite.file.model, suite.file.data
    start = f"from {model.weights}" if model.weights else "from scratch"
    return (
        f"T5 autoencoders {start}, {model.num_layers} encoder and {model.num_decoder_layers} decoder blocks "
        f"of width {model.d_model}, on {data.function.in_words(data.path)}; each decoder layer attends to "
        f"{PruningConfig.decoder_window} previous tokens"
    )


def shapes(runs: Sequence[PruningRun]) -> str:
    """The models of ``runs`` and their training masks, as part of a sentence."""
    models = dict.fromkeys(
        f"{model.num_layers} encoder and {model.num_decoder_layers} decoder blocks of width {model.d_model}, "
        + (f"from {model.weights}" if model.weights else "from scratch")
        for model in (run.model for run in runs)
    )
    masks = dict.fromkeys(run.training_mask for run in runs if run.compression is not None)
    whose = [f"{MASKS[mask]} ({'the' if mask == 'soft' else 'not the'} article's)" for mask in masks]
    return ", ".join(models) + (f", with {' or '.join(whose)}" if whose else "")


def at_paper_scale(item: FigureSpec, runs: Sequence[PruningRun]) -> bool:
    """Whether all models start from published weights, as in the article."""
    return bool(runs) and all(run.model.weights for run in runs)


def _is_published(file: File | PruningRun) -> bool:
    gates, training = file.pruning, file.training
    own = (gates.beta, gates.tau, training.lambda_off_loss, training.lambda_below_nats)
    return own == (5.0, 0.1, None, None)


def distance(item: FigureSpec, runs: Sequence[PruningRun]) -> float:
    """0 for a suite with the gates of the article's code, which decides, else 1."""
    return float(not any(run.training_mask == "soft" and _is_published(run) for run in runs))


def as_published(records: pd.DataFrame) -> pd.DataFrame:
    """The rows of runs that train like the published code, and of runs without gates; empty without both."""
    suites = {name: _is_published(load_suite(name).file) for name in records["suite"].unique()}
    gated = records["compression"].notna()
    article = records["suite"].map(suites) & (records["training_mask"] == "soft")
    return records[~gated | article] if (gated & article).any() else records[:0]


def of_the_article(check: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """Restricts a criterion to runs that train as published; other runs are inconclusive."""

    @functools.wraps(check)
    def judge(records: pd.DataFrame) -> Verdict:
        if len(own := as_published(records)):
            return check(own)
        found = check(records)
        masks = set(records.loc[records["compression"].notna(), "training_mask"])
        hard = masks == {"hard_concrete"}
        gates = "with hard concrete gates" if hard else "with other gates, beta, tau or lambda"
        return replace(
            found,
            word=Word.INCONCLUSIVE,
            short=f"{gates}, {found.short or found.ours}",
            ours=f"{gates}, {found.ours}\n{ARTICLE}",
        )

    return judge
