"""The needle-in-a-haystack test, easy mode (Figures 3 and 11, right; Figure 9)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from acp_repro.common.files import sha256_of
from acp_repro.pipeline.paper import Quantity
from acp_repro.pipeline.state import MAKE

if TYPE_CHECKING:
    from ..suite import FoXRun, FoXSuite
    from ..trained import TrainedFoX

_BATCHES = 4  # micro-batches of training in one of inference, which keeps nothing for a backward pass


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method, context length, haystack and depth of the needle.

    The method is the run's own. A run with ACP whose exact pair is not in the suite is also tested without
    pruning. The haystack is the run's held-out text, or ``measure.needle_haystack``. Results are kept until
    the record is written, so the same command continues where it was stopped.

    Raises:
        UsageError, DataError: the text is too short, or a context has no room for a haystack.
        TooLong: a context does not fit in memory.
    """
    return try_mode(trained, "easy", trained.methods())


def try_mode(trained: TrainedFoX, mode: str, methods: Iterable[str]) -> list[dict[str, Any]]:
    """The records of :func:`measure` for one of ``prompt.WORDINGS``.

    Args:
        methods: names of methods; before each, the model is set to it, see :meth:`TrainedFoX.methods`.
    """
    from acp_repro.pipeline.data import prepare

    from ..needle.haystack import file_haystacks, fingerprints, heldout_haystacks
    from ..needle.prompt import hide, tokenise_needles
    from ..needle.trial import default_lengths, try_needle
    from ..unfinished import Unfinished, identity

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
        weights = sha256_of(run.weights_file) if run.weights_file.is_file() else None
        key = identity(trained.model, weights) | {
            "lengths": lengths,
            "depths": settings.needle_depths,
            "haystacks": fingerprints(haystacks),
            "device": trained.device_name,
        }
        name = f"{run.name}.needle{'' if mode == 'easy' else '-' + mode}-{method}.jsonl"
        unfinished = Unfinished(MAKE / run.suite / name, key)
        found = try_needle(
            trained.model,
            hide(needles, haystacks),
            lengths,
            settings.needle_depths,
            decode=corpus.tokenizer.decode,
            dtype=run.training.dtype,
            batch_tokens=_BATCHES * run.training.micro_batch_tokens,
            description=f"{run.name}: needle, {method}",
            unfinished=unfinished,
        )
        trained.when_written(unfinished.finish)
        shared = {"method": method, "mode": mode, "needle_share": run.needle_share}
        shared["haystack"] = text or "held-out text"
        rows += [shared | row for row in found]
    return rows


COLUMNS = (
    "method mode haystack needle_share evaluated_length_tokens depth haystack_sample "
    "answer_tokens answer_recall exact_match answer_log_likelihood_nats "
    "answer_log_likelihood_without_needle_nats answer fact"
)


def _runs(suite: FoXSuite) -> list[FoXRun]:
    """The runs of Figures 3, 9, 11 and A6 and of Table A1."""
    longest, shorter = (suite.needle_runs("pro", longest=longest) for longest in (True, False))
    llama = suite.needle_runs("llama", longest=True)
    return suite.in_order(longest, shorter, llama, suite.needle_trainings)


QUANTITY = Quantity("needle", COLUMNS, measure, _runs, large=True, later=("fact",))
