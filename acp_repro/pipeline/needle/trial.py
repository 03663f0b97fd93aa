"""The needle test: greedy answers, and the log-likelihood of the right answer with and without the needle."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from acp_repro.common.command import progress_bar
from acp_repro.model import FoXForCausalLM, generate
from acp_repro.pipeline.training.trainer import autocast

from .prompt import Needle, Trial, first_line


def default_lengths(needles: Sequence[Needle], longest: int, count: int = 11) -> list[int]:
    """``count`` context lengths, evenly spaced up to ``longest``; the first has room for some haystack."""
    least = longest - min(needle.haystack_tokens(longest) for needle in needles)  # outside the haystack
    if count == 1:
        return [longest]
    first = max(longest / count, min(2 * least, longest))
    return sorted({round(length) for length in np.linspace(first, longest, count)})


def answer_log_likelihood(model: FoXForCausalLM, prompts: Tensor, answer: Tensor) -> Tensor:
    """log p(answer (N,) | prompts (B, T)) in nats, (B,) float32, summed over the answer's tokens."""
    row = answer.expand(len(prompts), -1)
    # Only the logits of the answer, because the logits of a long prompt would be the largest tensor.
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
) -> list[dict[str, Any]]:
    """One record for each length, trial and depth, in this order. Prompts of one length are batched up to
    ``batch_tokens`` tokens; ``decode`` converts the token ids of answers to text."""
    lengths = sorted(lengths)
    for trial in trials:  # a context that is too short fails here, before minutes of work
        trial.needle.haystack_tokens(lengths[0])
    cells = [(length, index) for length in lengths for index in range(len(trials))]
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    with progress_bar(total=len(cells) * len(depths), desc=description, unit="prompt") as bar:
        # Longest prompts first, so that running out of memory fails at once.
        for length, index in sorted(cells, reverse=True):
            with torch.no_grad():
                found[length, index] = _cell(
                    model, trials[index], length, depths, decode, dtype, batch_tokens
                )
            bar.update(len(depths))
    return [row for cell in cells for row in found[cell]]


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


def needle_table(rows: pd.DataFrame) -> str:
    """Recall in percent by depth and length, totals, and a sample answer, as text for the terminal."""
    recall = rows.pivot_table(index="depth", columns="evaluated_length_tokens", values="answer_recall")
    lines = ["recall of the needle's words (%), by depth and context length:"]
    lines.append("   depth" + "".join(f"{length:>9}" for length in recall.columns))
    for depth, values in recall.iterrows():
        lines.append(f"{depth:>8.2f}" + "".join(f"{100 * value:>9.0f}" for value in values))
    gain = rows["answer_log_likelihood_nats"] - rows["answer_log_likelihood_without_needle_nats"]
    found = rows.loc[rows["answer_recall"].idxmax()]
    lines += [
        f"mean recall {100 * rows['answer_recall'].mean():.0f} %, exact answers "
        f"{int(rows['exact_match'].sum())} of {len(rows)}",
        f"log-likelihood of the right answer: {gain.mean():+.1f} nats with the needle "
        f"({rows['answer_log_likelihood_nats'].mean():.1f}) against without "
        f"({rows['answer_log_likelihood_without_needle_nats'].mean():.1f}), "
        f"{found['answer_tokens']} tokens",
        f"best answer ({found['evaluated_length_tokens']} tokens, depth {found['depth']:g}): "
        f"{found['answer']!r}",
    ]
    return "\n".join(lines)
