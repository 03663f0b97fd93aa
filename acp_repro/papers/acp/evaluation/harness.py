"""Forgetting Transformers as a model of the LM Evaluation Harness.

:class:`FoXLM` works wherever the harness takes an ``LM``::

    lm = FoXLM.of(model, tokenizer, max_length=4096)
    lm_eval.simple_evaluate(lm, tasks=["piqa"])
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from typing import NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import nn
from tqdm import tqdm

from acp_repro.data.tokenizer import Tokenizer
from acp_repro.model.generation import stream_tokens
from acp_repro.training.step import autocast

from ..fits import check_tokenizer
from ..unfinished import Unfinished
from .scoring import Request, Score, Scorer

# Tokens of a batch: enough to keep an H100 busy with 125M parameters. On a CPU batches that fit its caches
# are faster.
BATCH_TOKENS = {"cuda": 65_536, "cpu": 2048}
DEFAULT_NEW_TOKENS = 256  # the harness's own


class FoXLM(TemplateLM):
    """A model with its tokeniser, for the harness.

    Every prompt begins with BOS, as every training sequence did; the authors' evaluation does the same. A
    prompt longer than ``max_length`` loses its beginning, with BOS.

    Args:
        scorer: holds the model and its settings.
        tokenizer: the model's own.
        progress: show a bar for each kind of request.

    Attributes:
        unfinished: if set, keeps every score as soon as it is known, and returns the scores that it has.
    """

    unfinished: Unfinished | None = None

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, progress: bool = True):
        super().__init__()
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.progress = progress
        # A question is the beginning of each of its answers.
        self._encode = functools.lru_cache(4096)(lambda text: tuple(map(int, tokenizer.encode(text))))

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        dtype: str | None = None,
        batch_tokens: int | None = None,
        share_contexts: bool | None = None,
        progress: bool = True,
    ) -> FoXLM:
        """The harness's view of a ``FoXForCausalLM``, which runs where its weights are.

        Args:
            max_length: tokens of context.
            dtype: default: ``bfloat16`` on a GPU, ``float32`` on a CPU.
            batch_tokens, share_contexts: see ``Scorer``; by default the fastest for the device.

        Raises:
            OtherTokenizer: the tokeniser is not the model's.
        """
        check_tokenizer(tokenizer.vocab_size, model.config.vocab_size, "tokenizer")
        device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        scorer = Scorer(
            model.eval(),
            device,
            max_length,
            batch_tokens or BATCH_TOKENS[device.type],
            dtype or ("bfloat16" if on_gpu else "float32"),
            share_contexts=not on_gpu if share_contexts is None else share_contexts,
        )
        return cls(scorer, tokenizer, progress)

    @property
    def max_length(self) -> int:
        """Tokens of context."""
        return self.scorer.max_length

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.scorer.device

    @property
    def eot_token_id(self) -> int:
        """The token that begins a text; FoX has one for both ends."""
        return self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """What the harness writes into its results as the tokeniser."""
        return getattr(self.tokenizer, "name", type(self.tokenizer).__name__)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """The ids of ``string``, after BOS unless ``add_special_tokens`` is False."""
        return [*([] if add_special_tokens is False else [self.tokenizer.bos_id]), *self._encode(string)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See ``TemplateLM.loglikelihood`` of lm-eval."""
        # Without the bar for tokenising, which takes a few seconds at most.
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs
    ) -> list[tuple[float, bool]]:
        return self._score([Request(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of ``max_length`` that share only the token before
        each."""
        windows: list[Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),  # the prefix is BOS
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [Request(*make_disjoint_window(window)) for window in found]
            windows += own
            counts.append(len(own))
        scores = iter(self._score(windows, "window"))
        return [sum(next(scores).log_likelihood for _ in range(count)) for count in counts]

    def _score(self, requests: list[Request], unit: str = "request") -> list[Score]:
        kept = self.unfinished if self.unfinished is not None else Unfinished(None, {})
        names = [_name(request) for request in requests]
        waiting = [place for place, name in enumerate(names) if name not in kept]
        before = len(requests) - len(waiting)

        def keep(places: list[int], scores: list[Score]) -> None:
            kept.add(
                {names[waiting[place]]: list(score) for place, score in zip(places, scores, strict=True)}
            )
            bar.update(len(places))

        bar = tqdm(total=len(requests), initial=before, unit=unit, disable=not self.progress, desc="scoring")
        with bar:
            self.scorer.score([requests[place] for place in waiting], keep)
        asked = set(waiting)
        self.scorer.truncated += sum(
            self.scorer.cuts(*request) for place, request in enumerate(requests) if place not in asked
        )
        return [Score(*kept[name]) for name in names]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, cut before the first stop string; prompts of one length go together."""
        groups: dict[tuple, list[tuple[int, list[int]]]] = defaultdict(list)
        for index, (prompt, options) in enumerate(request.args for request in requests):
            wanted = _Generation.of(options)
            room = max(1, self.max_length - wanted.new_tokens)
            ids = self.tok_encode(prompt)[-room:]
            groups[wanted, len(ids)].append((index, ids))
        texts = [""] * len(requests)
        with tqdm(total=len(requests), unit="request", disable=not self.progress, desc="generating") as bar:
            for (wanted, length), group in sorted(groups.items(), key=lambda item: -item[0][1]):
                rows = max(1, self.scorer.batch_tokens // (length + wanted.new_tokens))
                for start in range(0, len(group), rows):
                    batch = group[start : start + rows]
                    for (index, _), text in zip(batch, self._continue(batch, wanted), strict=True):
                        texts[index] = text
                    bar.update(len(batch))
        return texts

    def _continue(self, batch: list[tuple[int, list[int]]], wanted: _Generation) -> list[str]:
        scorer = self.scorer
        prompts = torch.tensor([ids for _, ids in batch], device=scorer.device)
        made: list[list[int]] = [[] for _ in batch]
        finished = [False] * len(batch)
        with autocast(scorer.device, scorer.dtype):
            for tokens in stream_tokens(
                scorer.model, prompts, wanted.new_tokens, wanted.temperature, top_p=wanted.top_p
            ):
                for row, token in enumerate(tokens.tolist()):
                    if finished[row]:
                        continue
                    made[row].append(token)
                    text = self.tokenizer.decode(made[row])
                    finished[row] = token == self.eot_token_id or any(stop in text for stop in wanted.stops)
                if all(finished):
                    break
        return [wanted.cut(self.tokenizer.decode(ids)) for ids in made]


def _name(request: Request) -> str:
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:24]


class _Generation(NamedTuple):
    """The settings of one request of ``generate_until``."""

    stops: tuple[str, ...]
    new_tokens: int
    temperature: float
    top_p: float | None

    @classmethod
    def of(cls, options: dict) -> _Generation:
        until = options.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(filter(None, until))
        new_tokens = int(options.get("max_gen_toks", options.get("max_new_tokens", DEFAULT_NEW_TOKENS)))
        temperature = float(options.get("temperature") or 0.0)
        if options.get("do_sample") is False:
            temperature = 0.0
        elif options.get("do_sample") and "temperature" not in options:
            temperature = 1.0
        return cls(stops, new_tokens, temperature, options.get("top_p"))

    def cut(self, text: str) -> str:
        ends = [text.find(stop) for stop in self.stops if stop in text]
        return text[: min(ends)] if ends else text
