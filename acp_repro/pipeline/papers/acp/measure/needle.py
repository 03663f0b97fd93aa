"""The needle-in-a-haystack test (Figures 3 and 11, right; Figure 9), and with two dozen facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from acp_repro.pipeline.data import prepare

from ..needle.haystack import file_haystacks, heldout_haystacks
from ..needle.prompt import hide, tokenise_needles
from ..needle.trial import default_lengths, try_needle
from ..trained import TrainedFoX

_BATCHES = 4  # micro-batches of training in one of inference, which keeps nothing for a backward pass


def measure_needle(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method, context length, haystack and depth of the needle. The haystack is the run's
    held-out text, or ``measure.needle_haystack``."""
    return try_mode(trained, "easy", trained.methods())


def try_mode(trained: TrainedFoX, mode: str, methods: Iterable[str]) -> list[dict[str, Any]]:
    """The records of one of ``prompt.WORDINGS``; before each of ``methods`` the model is set to it."""
    run, settings, corpus = trained.run, trained.measure_settings, prepare(trained.run.data)
    encode = corpus.tokenizer.encode
    needles = tokenise_needles(encode, corpus.bos_id, mode)
    lengths = settings.needle_lengths
    if isinstance(lengths, int):
        lengths = default_lengths(needles, run.context_length, lengths)
    text, samples = settings.needle_haystack, settings.needle_samples
    if text is None:
        haystacks = heldout_haystacks(corpus, run.context_length, max(lengths), samples)
    else:
        haystacks = file_haystacks(text, encode, max(lengths), samples, "measure.needle_haystack")
    rows = []
    for method in methods:
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
        shared = {"method": method, "mode": mode, "needle_share": run.needle_share}
        shared["haystack"] = text or "held-out text"
        rows += [shared | row for row in found]
    return rows


def measure_needle_facts(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method, context length, fact and depth. A run with ACP is tested as it was trained,
    and with pruning off: that difference comes from the evaluation, not from training."""
    return try_mode(trained, "facts", trained.methods(both=True))
