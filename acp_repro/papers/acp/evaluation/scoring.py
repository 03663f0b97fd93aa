"""Log-likelihoods of many short continuations. All code of the tasks that touches the model is here.

Requests are sorted by length, so that there is little padding. Requests with the same input share one forward
pass ("yes" and "no" after one question). Continuations of one context can share the pass over that context
through a ``FoXCache``. Logits are computed only where a continuation is scored.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acp_repro.common.errors import is_out_of_memory
from acp_repro.model.cache import FoXCache
from acp_repro.training.step import autocast

from ..fits import TooLong

_LOGIT_ROWS = 4096  # rows of float32 logits held at once; 0.8 GB with GPT-2's vocabulary
# A shared context is worth a second pass if it saves this share of the tokens. Contexts of its length must
# also fill this share of a batch, because a cache holds rows of one length. For four continuations with the
# 3M model on one core, 51 % fewer tokens take 26 % less time, and 72 % fewer half the time. Small batches
# gain nothing.
_MIN_SAVED, _MIN_BATCH = 0.4, 0.5


class Request(NamedTuple):
    """Token ids of a context, at least one, and of the continuation to score after it."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    """The sum of the continuation's log-probabilities in nats, and whether greedy decoding would give it."""

    log_likelihood: float
    is_greedy: bool


@dataclass
class Scorer:
    """Scores continuations with a causal language model.

    Attributes:
        model: gives (B, T, hidden) for ``model(input_ids, cache=..., return_hidden=True)`` and has an
            ``lm_head``; see ``FoXForCausalLM``.
        max_length: tokens of context; longer requests lose their beginning, as in the harness.
        batch_tokens: tokens of a batch, padding included; halved if memory is too small.
        dtype: ``bfloat16`` (autocast over the weights) or ``float32``.
        share_contexts: one pass over each context with several continuations. It saves tokens but makes
            batches smaller: faster on a CPU, not on a GPU. The model must support a ``FoXCache``.
        truncated: requests so far that lost their beginning.
        tokens: tokens that went through the model so far, padding included.
    """

    model: nn.Module
    device: torch.device
    max_length: int
    batch_tokens: int
    dtype: str
    share_contexts: bool = False
    truncated: int = 0
    tokens: int = 0

    @torch.no_grad()
    def score(
        self,
        requests: Sequence[Request],
        done: Callable[[list[int], list[Score]], object] = lambda indices, scores: None,
    ) -> list[Score]:
        """One score for each request, in their order.

        Args:
            done: called with the places of requests that were scored since the last call, and their scores.

        Raises:
            TooLong: a continuation alone is longer than ``max_length``, or one sequence does not fit in
                memory.
        """
        scores: list[Score | None] = [None] * len(requests)
        plain, shared = self._plan(requests)
        batches = itertools.chain(self._run(plain, self._one_pass), self._run(shared, self._two_passes))
        for indices, result in batches:
            for index, score in zip(indices, result, strict=True):
                scores[index] = score
            done(indices, result)
        return scores

    def cuts(self, context: Sequence[int], continuation: Sequence[int]) -> bool:
        """Whether a request loses its beginning."""
        return len(context) + len(continuation) > self.max_length + 1

    # --- which requests go together ---------------------------------------------------------------

    def _plan(self, requests: Sequence[Request]) -> tuple[list[_Plain], list[_Shared]]:
        inputs: dict[tuple[int, ...], _Plain] = {}
        contexts: dict[tuple[int, ...], list[tuple[int, list[int]]]] = defaultdict(list)
        for index, (context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise TooLong(
                    f"a continuation of {len(continuation)} tokens does not fit a context of "
                    f"{self.max_length}; evaluate at a longer one"
                )
            whole = (*context, *continuation)
            if self.cuts(context, continuation):
                self.truncated += 1
            elif self.share_contexts and continuation:
                contexts[tuple(context)].append((index, continuation))
                continue
            whole = whole[-(self.max_length + 1) :]
            inputs.setdefault(whole[:-1], _Plain(whole[:-1], [])).asked.append((index, continuation))
        lengths: dict[int, list[_Shared]] = defaultdict(list)
        for context, asked in contexts.items():
            lengths[len(context)].append(_Shared(context, asked))
        shared = []
        for groups in lengths.values():
            worth = [group for group in groups if group.saved >= _MIN_SAVED]
            if sum(group.tokens(group) for group in worth) < _MIN_BATCH * self.batch_tokens:
                worth = []
            shared += worth
            for group in groups:
                for index, continuation in [] if group in worth else group.asked:
                    whole = (*group.context, *continuation[:-1])
                    inputs.setdefault(whole, _Plain(whole, [])).asked.append((index, continuation))
        return list(inputs.values()), shared

    def _run(
        self, units: list[_Plain] | list[_Shared], score: Callable
    ) -> Iterator[tuple[list[int], list[Score]]]:
        """Scores units in batches of equal work, the longest first, so that one that does not fit fails at
        once."""
        waiting = sorted(units, key=lambda unit: (unit.key, unit.asked[0][0]), reverse=True)
        while waiting:
            batch, tokens = [], 0
            for unit in waiting:
                tokens += unit.tokens(waiting[0])
                if batch and (tokens > self.batch_tokens or not unit.fits(waiting[0])):
                    break
                batch.append(unit)
            try:
                result = score(batch)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if len(batch) == 1:
                    raise TooLong(
                        f"a sequence of {waiting[0].key[0]} tokens does not fit in this device's memory; "
                        "evaluate at a shorter context length"
                    ) from None
                self.batch_tokens = max(1, tokens // 2)
                torch.cuda.empty_cache()
                continue
            yield [index for unit in batch for index, _ in unit.asked], result
            waiting = waiting[len(batch) :]

    # --- the model --------------------------------------------------------------------------------

    def _one_pass(self, batch: list[_Plain]) -> list[Score]:
        with autocast(self.device, self.dtype):
            hidden = self._hidden([unit.input_ids for unit in batch])
            rows = []
            for row, unit in enumerate(batch):
                end = len(unit.input_ids)
                rows += [hidden[row, end - len(targets) : end] for _, targets in unit.asked]
            return self._log_likelihoods(rows, [targets for unit in batch for _, targets in unit.asked])

    def _two_passes(self, batch: list[_Shared]) -> list[Score]:
        asked = [targets for unit in batch for _, targets in unit.asked]
        copies = torch.tensor([len(unit.asked) for unit in batch], device=self.device)
        with autocast(self.device, self.dtype):
            cache = FoXCache(self.model.config.num_hidden_layers)
            last = self._hidden([unit.context for unit in batch], cache)[:, -1:]
            owners = torch.arange(len(batch), device=self.device).repeat_interleave(copies)
            first = last.index_select(0, owners)
            # The last token of a continuation is only predicted, never read.
            if max(map(len, asked)) == 1:
                return self._log_likelihoods(list(first), asked)
            rest = self._hidden([targets[:-1] for targets in asked], cache.select_rows(owners))
            rows = [
                torch.cat((begin, more[: len(targets) - 1]))
                for begin, more, targets in zip(first, rest, asked, strict=True)
            ]
            return self._log_likelihoods(rows, asked)

    def _hidden(self, rows: Sequence[Sequence[int]], cache: FoXCache | None = None) -> Tensor:
        """(B, T, hidden) of rows that are padded on the right, where no earlier token can see it."""
        longest = max(1, *map(len, rows))  # a continuation of one token leaves nothing to read
        padded = torch.zeros((len(rows), longest), dtype=torch.int64)
        for row, ids in enumerate(rows):
            padded[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self.tokens += padded.numel()
        return self.model(padded.to(self.device), cache=cache, return_hidden=True)

    def _log_likelihoods(self, rows: list[Tensor], targets: Iterable[list[int]]) -> list[Score]:
        """A score for each (tokens, hidden) in ``rows`` with its tokens."""
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        wanted = torch.tensor([i for ids in targets for i in ids], dtype=torch.int64, device=self.device)
        sums, greedy = [], []
        for hidden, ids in zip(torch.cat(rows).split(_LOGIT_ROWS), wanted.split(_LOGIT_ROWS), strict=True):
            logits = self.model.lm_head(hidden).float()
            chosen = logits.gather(1, ids[:, None])[:, 0]
            sums.append(chosen - logits.logsumexp(-1))
            greedy.append(logits.argmax(-1) == ids)
        owners = torch.arange(len(rows), device=self.device).repeat_interleave(lengths)
        totals = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        totals.index_add_(0, owners, torch.cat(sums).double())
        wrong = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        wrong.index_add_(0, owners, (~torch.cat(greedy)).long())
        return [Score(t, not w) for t, w in zip(totals.tolist(), wrong.tolist(), strict=True)]


@dataclass
class _Plain:
    """One input, whole, and the continuations that end it: each (index of the request, its tokens)."""

    input_ids: tuple[int, ...]
    asked: list[tuple[int, list[int]]]

    @property
    def key(self) -> tuple[int, ...]:
        return (len(self.input_ids),)

    def tokens(self, longest: _Plain) -> int:
        """Tokens that it adds to a batch as long as ``longest``."""
        return len(longest.input_ids)

    def fits(self, longest: _Plain) -> bool:
        return True


@dataclass(eq=False)
class _Shared:
    """One context and the continuations that follow it."""

    context: tuple[int, ...]
    asked: list[tuple[int, list[int]]]

    @property
    def key(self) -> tuple[int, ...]:
        return len(self.context), self.longest

    @property
    def longest(self) -> int:
        return max(len(targets) for _, targets in self.asked)

    @property
    def saved(self) -> float:
        """Share of tokens that one pass over the context saves."""
        inputs = {tuple(targets[:-1]) for _, targets in self.asked}
        alone = sum(len(self.context) + len(targets) for targets in inputs)
        return 1 - self._both_passes / alone

    @property
    def _both_passes(self) -> int:
        return len(self.context) + len(self.asked) * (self.longest - 1)

    def tokens(self, longest: _Shared) -> int:
        return self._both_passes

    def fits(self, longest: _Shared) -> bool:
        """Whether it goes with ``longest``: a cache holds rows of one length."""
        return len(self.context) == len(longest.context)
