"""The test itself: greedy answers from the cache, and the probability of the right one, with and without
needle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from acp_repro.model import FoXForCausalLM, generate
from acp_repro.pipeline.training.step import autocast

from ..fits import enough_memory
from ..unfinished import Unfinished
from .prompt import Needle, Trial, first_line


def default_lengths(needles: Sequence[Needle], longest: int, count: int = 11) -> list[int]:
    """``count`` context lengths, evenly spaced up to ``longest``; the first has room for some haystack.

    Raises:
        UsageError: not even ``longest`` has room for any.
    """
    least = longest - min(needle.haystack_tokens(longest) for needle in needles)  # of all except the haystack
    if count == 1:
        return [longest]
    first = max(longest / count, min(2 * least, longest))
    return sorted({round(length) for length in np.linspace(first, longest, count)})


def answer_log_likelihood(model: FoXForCausalLM, prompts: Tensor, answer: Tensor) -> Tensor:
    """log p(answer | prompt) in nats, summed over the answer's tokens.

    Args:
        prompts: (B, T) integer.
        answer: (N,) integer.

    Returns:
        (B,) float32 on the model's device.
    """
    row = answer.expand(len(prompts), -1)
    # Only logits of the answer's places: those of a long prompt would be the largest array of all.
    hidden = model(torch.cat([prompts, row[:, :-1]], 1), return_hidden=True)[:, -len(answer) :]
    scores = model.lm_head(hidden).float().log_softmax(-1)
    return scores.gather(-1, row[..., None]).squeeze(-1).sum(-1)


def try_needle(
    model: FoXForCausalLM,
    trials: Sequence[Trial],
    lengths: Iterable[int],
    depths: Sequence[float],
    *,
    decode: Callable[[Iterable[int]], str],
    dtype: str,
    batch_tokens: int,
    description: str,
    unfinished: Unfinished | None = None,
) -> list[dict[str, Any]]:
    """One record for each length, trial and depth, in this order.

    Args:
        trials: of :func:`hide`; each haystack is as long as the longest
            context takes.
        depths: see :meth:`Needle.prompt`.
        decode: token ids to text, for the answers.
        dtype: ``bfloat16`` (autocast over the weights) or ``float32``.
        batch_tokens: prompts of one length go together up to this many tokens.
        description: the text of the progress bar.
        unfinished: keeps partial results, so that a stopped run can continue.

    Raises:
        UsageError: a length holds no haystack, or a haystack is too short.
        TooLong: a length does not fit in memory; names it.
    """
    lengths = sorted(lengths)
    for length in lengths:  # errors are raised before minutes of work
        for trial in trials:
            trial.needle.prompt(trial.haystack, length, None)
    cells = [(length, index) for length in lengths for index in range(len(trials))]
    done = unfinished or Unfinished(None, {})
    with tqdm(total=len(cells) * len(depths), desc=description, unit="prompt", disable=None) as bar:
        # The longest first, so that one that does not fit fails at once.
        for length, index in sorted(cells, reverse=True):
            name = f"{length} {index}"
            if name not in done:
                with enough_memory(length), torch.no_grad():
                    done.add({name: _cell(model, trials[index], length, depths, decode, dtype, batch_tokens)})
            bar.update(len(depths))
    return [row for length, index in cells for row in done[f"{length} {index}"]]


def _cell(
    model: FoXForCausalLM,
    trial: Trial,
    length: int,
    depths: Sequence[float],
    decode: Callable[[Iterable[int]], str],
    dtype: str,
    batch_tokens: int,
) -> list[dict[str, Any]]:
    device = next(model.parameters()).device
    fact, needle, sample, haystack = trial
    answer = torch.from_numpy(needle.answer).to(device)
    prompts = torch.from_numpy(np.stack([needle.prompt(haystack, length, depth) for depth in depths]))
    bare = torch.from_numpy(needle.prompt(haystack, length, None))[None].to(device)
    with autocast(device, dtype):
        without = answer_log_likelihood(model, bare, answer).item()
        rows = []
        for some in prompts.split(max(1, batch_tokens // length)):
            some = some.to(device)
            likely = answer_log_likelihood(model, some, answer).tolist()
            said = generate(model, some, needle.room)[:, some.shape[1] :].tolist()
            rows += list(zip(likely, map(decode, said), strict=True))
    return [
        {
            "evaluated_length_tokens": length,
            "depth": depth,
            "haystack_sample": sample,
            "fact": fact,
            "answer_tokens": len(answer),
            "answer_recall": needle.wording.recall(text),
            "exact_match": int(needle.wording.is_exact(text)),
            "answer_log_likelihood_nats": likely,
            "answer_log_likelihood_without_needle_nats": without,
            "answer": first_line(text),
        }
        for depth, (likely, text) in zip(depths, rows, strict=True)
    ]
