"""Sampling against a simple, slow sampler, and the properties of its filters."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import SMALL

from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM, filter_logits, generation, stream_tokens
from acp_repro.model.generation import choose_tokens

# Few distinct values, so that ties are frequent.
LOGITS = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=12)
TOP_K = st.none() | st.integers(1, 14)


def reference_filter(logits: list[float], top_k: int | None, top_p: float | None) -> list[int]:
    """Candidate token ids, from a loop over tokens in order of decreasing probability."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    weights = [math.exp(logits[token] - max(logits)) for token in order]
    kept, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if top_p is not None and reached >= top_p * (1 + 1e-12):
            break
        kept.append(token)
        reached += weight / sum(weights)
    return sorted(kept)


@settings(deadline=None, max_examples=200)
@given(LOGITS, TOP_K, st.none() | st.sampled_from([0.123, 0.377, 0.618, 0.871]))
def test_filters_match_slow_reference_filters(logits, top_k, top_p):
    kept = filter_logits(torch.tensor(logits), top_k, top_p).isfinite().nonzero()[:, 0].tolist()
    assert kept == reference_filter(logits, top_k, top_p)


def test_top_p_keeps_the_smallest_sufficient_set():
    assert filter_logits(torch.zeros(4), top_p=0.5).isfinite().tolist() == [True, True, False, False]


def test_smallest_temperatures_select_the_most_likely_token():
    assert choose_tokens(torch.tensor([[1.0, 3.0, 2.0], [2.0, 1.0, -1.0]]), 1e-308).tolist() == [1, 0]


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (4, 0.8)])
def test_samples_follow_the_probabilities_of_the_slow_sampler(top_k, top_p):
    logits, draws, temperature = [1.0, 0.2, 2.0, -1.0, 0.7], 20_000, 1.7
    scaled = [x / temperature for x in logits]
    kept = reference_filter(scaled, top_k, top_p)
    weights = torch.tensor([math.exp(x) if t in kept else 0.0 for t, x in enumerate(scaled)])
    p = weights / weights.sum()
    rows = torch.tensor(logits).expand(draws, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = choose_tokens(rows, temperature, top_k=top_k, top_p=top_p, generator=generator)
    share = torch.bincount(drawn, minlength=5) / draws
    assert ((share - p).abs() <= 4.5 * (p * (1 - p) / draws).sqrt()).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_logits_are_rejected(temperature):
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        choose_tokens(torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), temperature)


def test_streamed_tokens_match_the_full_forward(small_model, small_ids):
    """A slow loop: a full forward for each token, with the same filters and samples."""
    prompt, options = small_ids[:, :30], {"top_k": 20, "top_p": 0.9}
    small_model.set_log_pruning_tolerance(None)
    ids, generator = prompt, torch.Generator().manual_seed(3)
    for _ in range(8):
        with torch.no_grad():
            logits = small_model(ids)[:, -1]
        p = filter_logits(logits.double() / 1.3, **options).softmax(-1)
        ids = torch.cat((ids, torch.multinomial(p, 1, generator=generator)), dim=1)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(small_model.generate(prompt, 8, 1.3, generator, **options), ids)


def test_stream_yields_each_token_before_computing_the_next(small_model, small_ids):
    calls = []
    small_model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    stream = stream_tokens(small_model, small_ids[:, :5], 3)
    assert not calls
    for n in range(1, 4):
        assert next(stream).shape == (2,) and len(calls) == n
    assert next(stream, None) is None and torch.is_grad_enabled()


@torch.no_grad()
@pytest.mark.parametrize(("tolerance", "padded"), [(None, False), (-10.0, True), (-400.0, True)])
def test_large_batches_are_split_and_rows_stay_independent(
    small_model, small_ids, monkeypatch, tolerance, padded
):
    """Prompt logits are bitwise identical to separate batches; later logits differ by the summation order of
    products with more rows."""
    small_model.set_log_pruning_tolerance(tolerance)
    prompt = torch.cat((small_ids, small_ids.flip(1), small_ids[:1].roll(7, 1)))  # five rows
    start = torch.tensor([0, 3, 149, 0, 3]) if padded else None
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 2 * prompt.shape[1])

    def logits_of(rows):
        cache = FoXCache(2, max_length=400)
        begin = None if start is None else start[rows]
        found = [generation.prefill(small_model, prompt[rows], cache, begin)]
        for begin, end in ((0, 1), (1, 2), (2, 52), (52, 53)):  # steps, and a chunk that allocates blocks
            found.append(small_model(prompt[rows, begin:end], cache)[:, -1])
        return found, cache

    joint, cache = logits_of(slice(0, 5))
    alone = [logits_of(slice(first, first + 2)) for first in (0, 2, 4)]
    apart = [torch.cat(logits) for logits in zip(*(found for found, _ in alone), strict=True)]
    assert torch.equal(joint[0], apart[0])
    torch.testing.assert_close(joint, apart, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.memory().per_head, torch.cat([one.memory().per_head for _, one in alone], 1))
    assert cache.evicted_at == max(one.evicted_at for _, one in alone)
    some = cache.select_rows(torch.tensor([4, 1]))
    expected = small_model(prompt[:, :1], cache)[[4, 1]]
    torch.testing.assert_close(small_model(prompt[[4, 1], :1], some), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_split_batches_can_be_rolled_back(small_model, small_ids, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 1)
    cache = FoXCache(2, max_length=120)
    cache.record_past()
    generation.prefill(small_model, small_ids[:, :100], cache)
    cache.crop(40)
    copied = copy.deepcopy(cache)
    for one in (cache, copied):
        for _ in range(2):  # a copy continues recording
            found = small_model(small_ids[:, 60:90], cache=one)
            right = small_model(small_ids[:, :90])[:, 60:]
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
            one.crop(30)


def test_generation_stops_at_stop_tokens(small_model, small_ids):
    prompt = small_ids[:, :20]
    whole = small_model.generate(prompt, 30)
    stop = int(whole[0, 25])
    first = [next((t for t in range(20, 50) if int(row[t]) == stop), 49) for row in whole]
    out = small_model.generate(prompt, 30, stop_ids=(stop,))
    assert out.shape[1] == max(first) + 1
    for row, expected, end in zip(out, whole, first, strict=True):
        assert torch.equal(row[: end + 1], expected[: end + 1])
        assert (row[end:] == row[end]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0}, "top_k must be a whole number of at least 1"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"top_k": True}, "top_k must be a whole number of at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"temperature": math.nan}, "temperature must be 0"),
        ({"temperature": math.inf}, "temperature must be 0"),
        ({"seq_start": torch.tensor([-1])}, r"seq_start must be \(batch,\) numbers of at least 0"),
        ({"seq_start": torch.zeros(2)}, r"seq_start must be \(batch,\) numbers of at least 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more"),
    ],
)
def test_invalid_arguments_are_rejected_at_the_call(arguments, message):
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    with pytest.raises(ValueError, match=message):
        stream_tokens(model, torch.zeros(1, 1, dtype=torch.int64), **{"max_new_tokens": 1, **arguments})


@torch.no_grad()
def test_rows_of_different_lengths_continue_independently(small_model, small_ids, monkeypatch):
    """Padded on the left, in chunks of which the first contains only padding for one row."""
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 1)  # chunks of 128 tokens
    prompt = small_ids[:, :150].clone()
    start = torch.tensor([0, 139])
    found = small_model.generate(prompt, 5, seq_start=start)
    for row in range(2):
        alone = small_model.generate(prompt[row : row + 1, int(start[row]) :], 5)
        assert found[row, 150:].tolist() == alone[0, -5:].tolist()
    with pytest.raises(ValueError, match="a row of 150 tokens without a real one"):
        small_model.generate(prompt, 5, seq_start=start + 11)
