import copy
import math

import pytest
import torch
from model_helpers import SMALL, relative_error, run_in_chunks, with_strong_gates

from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM


@pytest.mark.parametrize("cuts", [[100, *range(101, 130)], [1, 65, 66, 140]])
def test_decoding_with_pruning_stays_within_epsilon(small_model, small_ids, cuts):
    """The threshold depends on the current length, so pruning differs by less than epsilon."""
    with torch.no_grad():
        full = small_model(small_ids)
    assert relative_error(run_in_chunks(small_model, small_ids, cuts), full) < math.exp(-10)


@torch.no_grad()
@pytest.mark.slow
def test_compiled_model_continues_from_a_cache():
    model = with_strong_gates(FoXForCausalLM(FoXConfig.pro(**{**SMALL, "num_hidden_layers": 1})))
    model.set_log_pruning_tolerance(-1.0)
    ids = torch.randint(0, SMALL["vocab_size"], (2, 75))
    torch.compiler.reset()
    found = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        cache = FoXCache(1, max_length=80)
        model(ids[:, :70], cache=cache)
        found.append(torch.cat([call(ids[:, t : t + 1], cache=cache) for t in range(70, 75)], dim=1))
        assert cache.length == 75
    # Compiled code fuses projections, which changes the summation order.
    assert relative_error(found[1], found[0]) < 1e-5


def test_decoding_under_autocast(small_model, small_ids):
    with torch.no_grad():
        float32 = small_model(small_ids)
    with torch.autocast("cpu", torch.bfloat16):
        full = small_model(small_ids).detach()
        cache = FoXCache(2, max_length=150)
        parts = run_in_chunks(small_model, small_ids, range(120, 150), cache)
    assert cache.layers[0].pool.k.dtype == torch.bfloat16
    assert relative_error(parts, full) <= relative_error(full, float32)


def test_cache_rejects_gradients(small_model, small_ids):
    with pytest.raises(RuntimeError, match=r"call the model under torch.no_grad\(\)"):
        small_model(small_ids, cache=FoXCache(2))
    small_model.requires_grad_(False)
    small_model.model.layers[1].attn.fgate_proj.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"call the model under torch.no_grad\(\)"):
        small_model(small_ids, cache=FoXCache(2))


@torch.no_grad()
def test_cache_rejects_input_that_does_not_continue_it(small_model, small_ids):
    cache = FoXCache(2, max_length=160)
    small_model(small_ids, cache=cache)
    with (
        pytest.raises(ValueError, match="continue with the same batch and dtype"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        small_model(small_ids[:, :4], cache=cache.select_rows(torch.arange(2)))
    start = torch.zeros(2, dtype=torch.int64)
    for words, given, options in (
        ("the same batch and dtype", small_ids[:1, :4], {"cache": cache}),
        ("max_length 160", small_ids[:, :11], {"cache": cache}),
        ("first tokens only", small_ids[:, :4], {"cache": cache, "seq_start": start}),
        ("cache has 3 layers", small_ids, {"cache": FoXCache(3)}),
    ):
        with pytest.raises(ValueError, match=words):
            small_model(given, **options)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 12])
def test_failed_call_leaves_a_valid_cache_or_a_clear_error(small_model, small_ids, monkeypatch, tokens):
    cache, new = FoXCache(2, max_length=60), small_ids[:, 20 : 20 + tokens]
    small_model(small_ids[:, :20], cache=cache)

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(ValueError, match="below vocab_size"):
        small_model(new + 10**6, cache=cache)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(small_model.model.layers[0], "forward", no_memory)  # fails before a layer writes
        small_model(new, cache=cache)
    before = copy.deepcopy(cache)
    found, right = small_model(new, cache=cache), small_model(small_ids[:, : 20 + tokens])[:, 20:]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(before.layers[1].pool, "write", no_memory)  # fails in the second layer
        small_model(new, cache=before)
    with pytest.raises(ValueError, match="half written: start a new FoXCache"):
        small_model(new, cache=before)


@torch.no_grad()
def test_cache_is_bound_to_its_model(small_model, small_ids):
    cache = FoXCache(2)
    small_model(small_ids[:, :20], cache=cache)
    with pytest.raises(ValueError, match="another model began this cache"):
        copy.deepcopy(small_model)(small_ids[:, 20:21], cache=cache)
    copied = copy.deepcopy(cache)
    del cache
    found = small_model(small_ids[:, 20:30], cache=copied)
    torch.testing.assert_close(found, small_model(small_ids[:, :30])[:, 20:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        FoXCache(2, max_length=-5)
