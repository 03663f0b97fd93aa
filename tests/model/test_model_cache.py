from __future__ import annotations

import itertools
import math

import pytest
import torch
from model_helpers import SMALL, relative_error, with_strong_gates

from acp_repro.attention.threshold import logit_bound_from_norms
from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM
from acp_repro.model.cache import LayerCache


@torch.no_grad()
def in_parts(model, ids, cuts, cache=None):
    """Logits of the whole, computed between the cuts one after the other."""
    cache = cache or FoXCache(model.config.num_hidden_layers)
    edges = [0, *cuts, ids.shape[1]]
    parts = []
    for start, end in itertools.pairwise(edges):
        parts.append(model(ids[:, start:end], cache=cache))
        assert cache.length == end
    return torch.cat(parts, dim=1)


@torch.no_grad()
def rounding_scale(model, ids) -> float:
    """How far two right implementations are from each other in this dtype: the dense one, and the
    one in blocks."""
    blocks = model(ids)
    for block in model.model.layers:
        block.attn.core.implementation = "reference"
    dense = model(ids)
    for block in model.model.layers:
        block.attn.core.implementation = "auto"
    return relative_error(blocks, dense)


@pytest.mark.parametrize("cuts", [range(1, 150), [100, *range(101, 150)], [64], [1, 65, 66, 140]])
def test_decoding_is_the_full_forward(small_model, small_ids, cuts):
    """Exact attention: the same numbers, summed in another order."""
    small_model.set_log_pruning_tolerance(None)
    with torch.no_grad():
        full = small_model(small_ids)
    # Products of one row sum in another order than those of many, in each matrix of the model,
    # where the two implementations differ in the attention only.
    budget = 4 * rounding_scale(small_model, small_ids)
    assert relative_error(in_parts(small_model, small_ids, cuts), full) <= budget


@pytest.mark.parametrize("cuts", [[100, *range(101, 150)], [1, 65, 66, 140]])
def test_decoding_with_pruning_stays_within_epsilon(small_model, small_ids, cuts):
    """The threshold follows the length so far, so what is pruned differs, by less than epsilon."""
    with torch.no_grad():
        full = small_model(small_ids)
    assert relative_error(in_parts(small_model, small_ids, cuts), full) < math.exp(-10)


def test_decoding_under_autocast(small_model, small_ids):
    with torch.no_grad():
        float32 = small_model(small_ids)
    with torch.autocast("cpu", torch.bfloat16):
        full = small_model(small_ids).detach()
        cache = FoXCache(2, max_length=150)
        parts = in_parts(small_model, small_ids, range(120, 150), cache)
    assert cache.layers[0].append(*empty_like_cache(cache.layers[0]))[0].dtype == torch.bfloat16
    assert relative_error(parts, full) <= relative_error(full, float32)


def empty_like_cache(layer: LayerCache):
    """Zero more tokens."""
    k, v, log_fgate = layer._buffers
    return k[:, :, :0], v[:, :, :0], log_fgate[:, :, :0]


def test_longest_key_gives_the_bound_of_all_keys():
    torch.manual_seed(0)
    cache = LayerCache()
    q = torch.randn(2, 3, 1, 16)
    for time in (5, 1, 1, 40, 1):
        k = torch.randn(2, 3, time, 16)
        keys, _, _ = cache.append(k, k, k[..., 0])
        longest = cache.longest_key(keys)
        assert longest.shape == (2, 3, 1, 16)
        assert torch.equal(logit_bound_from_norms(q, longest), logit_bound_from_norms(q, keys))


def test_buffers_grow_by_doubling_or_are_allocated_once():
    def storages(cache, tokens):
        seen = []
        for t in range(tokens):
            k = torch.full((1, 1, 1, 4), float(t))
            keys, _, gates = cache.append(k, k, k[..., 0])
            if not seen or seen[-1] != keys.data_ptr():
                seen.append(keys.data_ptr())
        assert torch.equal(keys[0, 0, :, 0], torch.arange(float(tokens)))
        assert torch.equal(gates[0, 0], torch.arange(float(tokens)))
        assert keys.shape[2] == cache.length == tokens <= cache.capacity
        return len(seen)

    assert storages(LayerCache(), 1000) <= 5  # 64, 128, 256, 512, 1024
    exact = LayerCache(max_length=1000)
    assert storages(exact, 1000) == 1 and exact.capacity == 1000
    assert storages(LayerCache(max_length=10), 30) > 1  # a length that was too short is no error


def test_cache_refuses_gradients(small_model, small_ids):
    with pytest.raises(RuntimeError, match=r"call the model under torch.no_grad\(\)"):
        small_model(small_ids, cache=FoXCache(2))


@torch.no_grad()
def test_cache_refuses_what_does_not_continue_it(small_model, small_ids):
    cache = FoXCache(2)
    small_model(small_ids, cache=cache)
    layer = cache.layers[0]
    k, v, log_fgate = empty_like_cache(layer)
    with pytest.raises(ValueError, match="continue with the same batch and dtype"):
        layer.append(k.bfloat16(), v.bfloat16(), log_fgate)
    with pytest.raises(ValueError, match="continue with the same batch and dtype"):
        layer.append(k[:1], v[:1], log_fgate[:1])
    with pytest.raises(ValueError, match="cache has 3 layers, the model has 2"):
        small_model(small_ids, cache=FoXCache(3))


def test_greedy_takes_the_likeliest_token_each_time(small_model, small_ids):
    prompt = small_ids[:, :40]
    out = small_model.generate(prompt, 12)
    assert out.shape == (2, 52) and out.dtype == torch.int64
    assert torch.equal(out[:, :40], prompt)
    with torch.no_grad():
        assert torch.equal(small_model(out)[:, 39:-1].argmax(-1), out[:, 40:])
    assert torch.equal(small_model.generate(prompt.int(), 12), out)
    assert torch.equal(small_model.generate(prompt, 0), prompt)


def test_sampling_follows_its_generator():
    torch.manual_seed(0)
    model = with_strong_gates(FoXForCausalLM(FoXConfig.pro(**SMALL)))
    prompt = torch.zeros(3, 1, dtype=torch.int64)

    def sample(seed, temperature):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, 16, temperature, generator)

    assert torch.equal(sample(1, 1.0), sample(1, 1.0))
    assert not torch.equal(sample(1, 1.0), sample(2, 1.0))
    assert torch.equal(sample(1, 1e-4), model.generate(prompt, 16))


def test_sampling_draws_from_the_softmax():
    torch.manual_seed(0)
    model = FoXForCausalLM(FoXConfig.pro(**{**SMALL, "vocab_size": 5, "initializer_range": 0.3}))
    prompt = torch.zeros(4000, 1, dtype=torch.int64)
    drawn = model.generate(prompt, 1, 2.0, torch.Generator().manual_seed(0))[:, 1]
    with torch.no_grad():
        p = torch.softmax(model(prompt[:1])[0, 0] / 2.0, -1)
    share = torch.bincount(drawn, minlength=5) / 4000
    assert ((share - p).abs() < 4 * (p * (1 - p) / 4000).sqrt()).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more"),
        ({"max_new_tokens": 1, "temperature": -0.5}, "temperature must be 0"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature must be 0"),
    ],
)
def test_wrong_arguments_of_generate_are_named(arguments, message):
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    with pytest.raises(ValueError, match=message):
        model.generate(torch.zeros(1, 1, dtype=torch.int64), **arguments)
