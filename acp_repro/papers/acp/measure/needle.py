"""Answers about a needle in a trained run's held-out text (Figures 3, 9, 11 and A6; Table A1)."""

from typing import Any

from acp_repro.pipeline.data import prepare
from acp_repro.pipeline.needle.haystack import heldout_haystacks
from acp_repro.pipeline.needle.prompt import hide, tokenise_needles
from acp_repro.pipeline.needle.trial import default_lengths, try_needle
from acp_repro.pipeline.paper import with_columns

from ..trained import TrainedFoX

_BATCHES = 4  # training micro-batches per inference batch, which stores nothing for a backward pass

_COLUMNS = (
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


@with_columns(*_COLUMNS)
def measure_needle(trained: TrainedFoX, mode: str = "easy", *, both: bool = False) -> list[dict[str, Any]]:
    """One record for each method, context length, haystack and depth of the needle. The haystack is the run's
    held-out text, ``mode`` one of ``prompt.WORDINGS``; see ``TrainedFoX.methods`` for ``both``."""
    run, settings, corpus = trained.run, trained.measure_settings, prepare(trained.run.data)
    needles = tokenise_needles(corpus.tokenizer.encode, corpus.bos_id, mode)
    lengths = settings.needle_lengths
    if isinstance(lengths, int):
        lengths = default_lengths(needles, run.context_length, lengths)
    haystacks = heldout_haystacks(corpus, run.context_length, max(lengths), settings.needle_samples)
    rows = []
    for method in trained.methods(both):
        found = try_needle(
            trained.model,
            hide(needles, haystacks),
            lengths,
            settings.needle_depths,
            decode=corpus.tokenizer.decode,
            dtype=run.training.dtype,
            batch_tokens=_BATCHES * run.training.micro_batch_tokens,
            description=f"{run.name}: needle, {method}",
        )
        shared = {
            "method": method,
            "mode": mode,
            "needle_fraction": run.needle_fraction,
            "haystack": "held-out text",
        }
        rows += [shared | row for row in found]
    return rows


@with_columns(*_COLUMNS)
def measure_needle_facts(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method, context length, fact and depth. A run with ACP is tested with and without
    pruning: this difference is due to the evaluation, not to training."""
    return measure_needle(trained, "facts", both=True)
