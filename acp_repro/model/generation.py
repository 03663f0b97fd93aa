"""Generates text one token at a time: a prefill, then one forward pass per token from the cache."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .cache import FoXCache
from .decode_step import CAPTURING, DecodeStep

# Tokens of all rows in one part of a prefill: half a GiB of activations of the 125M model in bfloat16. The
# number is a multiple of the pruning blocks, so a chunk prunes the same blocks as the whole prefill.
PREFILL_TOKENS = 2**16
# Models with fewer parameters decode with one thread, because several would mostly wait for each other. On
# two busy cores, a model of 4.5 million parameters decoded 47 tokens/s with one thread and 4 with two.
_FEWEST_PARAMETERS_FOR_THREADS = 20_000_000


def filter_logits(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Logits with ``-inf`` for the tokens that may not be drawn; first top-k, then top-p of the rest.

    Tokens of equal logits are ordered by their ids. The same logits therefore always keep the same tokens,
    and exactly ``top_k`` of them.

    Args:
        logits: (..., vocab).
        top_k: keep this many tokens; None, or at least the vocabulary's size, keeps all.
        top_p: keep the fewest most probable tokens whose probabilities sum to at least this (nucleus
            sampling, Holtzman et al. 2020). The most probable token always stays. None keeps all.

    Returns:
        (..., vocab) in the dtype of ``logits``.
    """
    vocab = logits.shape[-1]
    if (top_k is None or top_k >= vocab) and (top_p is None or top_p == 1):
        return logits
    falling, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        falling[..., top_k:] = -math.inf
    if top_p is not None:
        # A token is kept if the sum of all more probable tokens is below top_p.
        reached = falling.double().softmax(-1).cumsum(-1)
        before = torch.nn.functional.pad(reached[..., :-1], (1, 0))
        falling = falling.masked_fill(before >= top_p, -math.inf)
    return torch.empty_like(falling).scatter_(-1, order, falling)


def choose_tokens(
    logits: Tensor,
    temperature: float = 0.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token (B,) int64 for each row of logits (B, vocab) float32; the rest as :func:`stream_tokens`.

    Raises:
        ValueError: the logits contain NaN or infinity. On a GPU a device-side assertion fails, because the
            host does not wait.
    """
    finite = logits.isfinite().all()
    said = "the logits hold NaN or infinity: the weights are damaged, or their dtype is too small"
    if logits.is_cuda:
        torch._assert_async(finite, said)  # pyright: ignore[reportPrivateImportUsage]
    elif not finite:
        raise ValueError(said)
    if temperature == 0:
        return logits.argmax(dim=-1)
    # In float64 and relative to the largest logit, because a tiny temperature would otherwise overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    probabilities = torch.softmax(filter_logits(scaled, top_k, top_p), dim=-1)
    with CAPTURING:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def stream_tokens(
    model: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    seq_start: Tensor | None = None,
) -> Iterator[Tensor]:
    """The tokens that continue ``input_ids``, each as soon as it is chosen.

    Args:
        model: a :class:`FoXForCausalLM`.
        input_ids: (B, T) integer, all rows of one length.
        max_new_tokens: end after this many.
        temperature: 0 selects the most probable token; values above 0 sample from softmax(logits /
            temperature).
        top_k, top_p: the tokens that may be sampled, see :func:`filter_logits`.
        generator: source of randomness, on the device of the logits; None uses torch's default.
        stop_ids: end when every row has had one of these; a row that had one repeats it until then.
        seq_start: (B,) int64, the first real token of rows that are padded on the left to one length.

    Yields:
        (B,) int64 on the model's device; a stopping token is yielded too.

    Raises:
        ValueError: an argument is out of range, or input_ids has another shape. Raised at the call, not at
            the first token.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (greedy) or above and finite, got {temperature}")
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise ValueError(f"top_k must be a whole number of at least 1, or None for all tokens, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, or None for all tokens, got {top_p}")
    model.check_input_ids(input_ids)
    if seq_start is not None:
        if seq_start.shape != input_ids.shape[:1] or bool((seq_start < 0).any()):
            raise ValueError(f"seq_start must be (batch,) numbers of at least 0, got {seq_start.tolist()}")
        if bool((seq_start >= input_ids.shape[1]).any()):
            raise ValueError(f"seq_start leaves a row of {input_ids.shape[1]} tokens without a real one")
    choose = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
    return _stream(model, input_ids, max_new_tokens, tuple(stop_ids), choose, seq_start)


def prefill(model: Any, input_ids: Tensor, cache: FoXCache, seq_start: Tensor | None = None) -> Tensor:
    """Fills an empty cache with a prompt; returns the logits (B, vocab) float32 of the next token."""
    # The prefill runs in parts, so that the activations of one layer need less memory than the cache. Parts
    # are groups of rows, because every chunk of a row would read its cached tokens again. Only a row that is
    # longer than a part is split into chunks.
    batch, length = input_ids.shape
    rows = max(PREFILL_TOKENS // length, 1)
    if rows >= batch:
        return _prefill_rows(model, input_ids, cache, seq_start)
    parts, logits = [], []
    for first in range(0, batch, rows):
        these = slice(first, first + rows)
        parts.append(copy.deepcopy(cache))
        start = None if seq_start is None else seq_start[these]
        logits.append(_prefill_rows(model, input_ids[these], parts[-1], start))
    cache.join(parts)
    return torch.cat(logits)


def _prefill_rows(model, input_ids, cache, seq_start) -> Tensor:
    hidden: Any = None
    for part in input_ids.split(max(PREFILL_TOKENS, 128), dim=1):
        hidden = model(part, cache=cache, return_hidden=True, seq_start=seq_start)
        seq_start = None  # the cache has stored it
    return model.lm_head(hidden[:, -1]).float()


@torch.no_grad()
def _stream(model, input_ids, max_new_tokens, stop_ids, choose, seq_start) -> Iterator[Tensor]:
    # The last token is returned without a forward pass. The maximum length fixes delta, which allows
    # eviction.
    longest = input_ids.shape[1] + max(max_new_tokens, 1) - 1
    cache = FoXCache(model.config.num_hidden_layers, max_length=longest)
    step, stopped, tokens = DecodeStep(model, cache), None, None
    stops = torch.tensor(stop_ids, dtype=torch.int64, device=input_ids.device)
    for _ in range(max_new_tokens):
        logits = prefill(model, input_ids, cache, seq_start) if tokens is None else step(tokens)
        chosen = choose_tokens(logits, **choose)
        tokens = chosen if tokens is None or stopped is None else torch.where(stopped, tokens, chosen)
        yield tokens
        if stop_ids:
            stopped = torch.isin(tokens, stops)
            if bool(stopped.all()):
                return


def generate(
    model: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: tuple[int, ...] = (),
    seq_start: Tensor | None = None,
) -> Tensor:
    """The prompt and the tokens that :func:`stream_tokens` adds to it, with its arguments and errors.

    Returns:
        (B, T + new) int64, the prompt first; new is max_new_tokens, or less if ``stop_ids`` ended it.
    """
    options = {"top_k": top_k, "top_p": top_p, "stop_ids": stop_ids, "generator": generator}
    new = stream_tokens(model, input_ids, max_new_tokens, temperature, seq_start=seq_start, **options)
    return torch.cat((input_ids.long(), *(tokens[:, None] for tokens in new)), dim=1)


def use_one_thread_if_small(model: Any) -> None:
    """Sets the process to one thread if ``model``, a :class:`FoXForCausalLM`, is small and on a CPU."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and model.config.num_parameters() < _FEWEST_PARAMETERS_FOR_THREADS:
        torch.set_num_threads(1)
