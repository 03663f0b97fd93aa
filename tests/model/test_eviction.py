"""Eviction reduces memory and preserves outputs: the cache against the training forward, which never evicts.

Log epsilon is -30, so the pruned weight (1e-13 of a row) is far below rounding: the error budget is that of
two correct implementations of one formula with different summation orders.
"""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_helpers import SMALL, relative_error, run_in_chunks, with_strong_gates

from acp_repro.attention.reference import pruned_mass
from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM, layer_cache
from acp_repro.model.blocks import BLOCK_SIZE, BlockPool
from acp_repro.model.capture import watch_attention
from acp_repro.model.layer_cache import DECODE_TOKENS, LayerCache
from acp_repro.model.layers import ForgettingAttentionCore

LONGEST = 640


def make_model(architecture="pro", local_bias=-8.0, global_bias=6.0, **fields):
    """Half of the heads attend to one or two tokens; log epsilon -30 still prunes some blocks of 64."""
    torch.manual_seed(0)
    config = getattr(FoXConfig, architecture)(**{**SMALL, "log_pruning_tolerance": -30.0, **fields})
    model = with_strong_gates(FoXForCausalLM(config))
    for block in model.model.layers:
        bias = block.attn.fgate_proj.bias
        local = torch.arange(len(bias)) % 2 == 0
        with torch.no_grad():
            bias.copy_(torch.where(local, local_bias, global_bias))
            block.attn.fgate_proj.weight.mul_(0.1)
    return model.requires_grad_(False)


MODELS = {name: make_model(name) for name in ("pro", "llama")}
MODELS["rope"] = with_strong_gates(FoXForCausalLM(FoXConfig.rope(**SMALL))).requires_grad_(False)


@st.composite
def chunks(draw):
    """A length and its chunk boundaries: one chunk, several chunks, single tokens at the end."""
    length = draw(st.integers(2, 420))
    chunks = draw(st.lists(st.integers(1, length - 1), max_size=4, unique=True))
    single = draw(st.integers(0, min(12, length - 1)))
    return length, sorted({*chunks, *range(length - single, length)} - {0, length})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(chunks=chunks(), architecture=st.sampled_from([*MODELS]), evict=st.booleans(), padded=st.booleans())
def test_cached_decoding_equals_the_full_forward(chunks, architecture, evict, padded):
    """With and without eviction, for rows of different lengths and any chunking."""
    model, (length, cuts) = MODELS[architecture], chunks
    ids = torch.randint(0, SMALL["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length))
    seq_start = torch.tensor([0, length * 2 // 3]) if padded else None
    cache = FoXCache(2, max_length=LONGEST if evict else None)
    found = run_in_chunks(model, ids, cuts, cache, seq_start)
    for row in range(2):
        real = 0 if seq_start is None else int(seq_start[row])
        whole = model(ids[row : row + 1, real:])
        assert relative_error(found[row : row + 1, real:], whole) < 2e-5


@pytest.mark.parametrize(
    ("architecture", "prompt", "starts"), [("pro", 64, [0, 63]), ("llama", 129, [9, 40]), ("pro", 190, None)]
)
@torch.no_grad()
def test_pruned_weights_of_a_step_sum_below_epsilon(architecture, prompt, starts, monkeypatch):
    """Checks every row by its exact weights, including evicted keys, across block boundaries."""
    model, length = make_model(architecture, -3.0, -0.3, log_pruning_tolerance=-10.0), prompt + 68
    ids = torch.randint(0, SMALL["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))
    attend, past, left_out = LayerCache.attend, {}, []

    def see(self, core, q, k, v, log_fgate, threshold):
        out = attend(self, core, q, k, v, log_fgate, threshold)
        if self in past:
            k, log_fgate = (torch.cat(x, 2) for x in zip(past[self], (k, log_fgate), strict=True))
            first = (self.pool.first_read_block.long() + self.parent.dropped_columns) * BLOCK_SIZE
            kept = torch.arange(k.shape[2]) >= first[..., None, None]
            options = {"seq_start": self.parent.seq_start, "sm_scale": q.shape[-1] ** -0.5}
            left_out.append(pruned_mass(q, k, log_fgate, kept, **options).max().item())
        past[self] = k, log_fgate
        return out

    monkeypatch.setattr(LayerCache, "attend", see)
    for longest in (length, None):
        cache = FoXCache(2, max_length=longest)
        run_in_chunks(model, ids, [*range(prompt, length)], cache, starts and torch.tensor(starts))
        assert bool(cache.evicted_at) == (architecture == "pro" and longest is not None)
        assert 0 < max(left_out) < math.exp(-10) and cache.length == length
        past.clear(), left_out.clear()


def test_local_heads_free_blocks_and_global_heads_keep_them():
    model, length = MODELS["pro"], 400
    ids = torch.randint(0, SMALL["vocab_size"], (2, length), generator=torch.Generator().manual_seed(1))
    use = {}
    for name, longest in (("evicting", LONGEST), ("keeping", None)):
        cache = FoXCache(2, max_length=longest)
        run_in_chunks(model, ids, [370, *range(371, length)], cache)
        use[name] = cache.memory()
        assert ("max_length" in cache.no_eviction_reason) == (name == "keeping")
    blocks = -(-length // BLOCK_SIZE)
    one = BLOCK_SIZE * (2 * 16 * 4 + 8)  # k and v of 16 numbers, and c
    kept, whole = use["evicting"], use["keeping"]
    assert (whole.per_head == blocks * one).all()
    assert (kept.per_head[..., 0::2] <= 2 * one).all()  # local: the newest block and its predecessor
    assert (kept.per_head[..., 1::2] == blocks * one).all()
    # A table shared by the layer frees nothing, because one of its heads is global.
    assert (kept.per_layer == 4 * blocks * one).all()
    assert int(kept.per_head.sum()) <= kept.allocated < 0.8 * whole.allocated
    # A prefill allocates only blocks that it keeps.
    cache = FoXCache(2, max_length=LONGEST)
    model(ids, cache=cache)
    assert cache.layers[0].pool.allocated_bytes < 0.75 * 2 * 4 * blocks * one


def test_memory_stays_constant_over_a_long_stream():
    model = make_model(global_bias=-8.0, hidden_size=32, num_heads=2, num_hidden_layers=2)
    cache = FoXCache(2, max_length=10**6)
    ids = torch.randint(
        0, SMALL["vocab_size"], (1, DECODE_TOKENS), generator=torch.Generator().manual_seed(1)
    )
    allocated = []
    with torch.no_grad():
        for step in range(120):  # 960 tokens: 15 blocks of each head
            logits = model(ids, cache=cache)
            if step % 30 == 29:
                allocated.append(cache.memory().allocated)
    assert cache.length == 960 and cache.dropped_columns > 10
    assert max(allocated[1:]) == allocated[1] <= 2 * 2 * 12 * cache.layers[0].pool.block_bytes
    # The last tokens have the same outputs without the evicted keys.
    with torch.no_grad():
        alone = model(ids.repeat(1, 30))[:, -DECODE_TOKENS:]
    assert relative_error(logits, alone) < 1e-5


@torch.no_grad()
def test_cropping_stops_at_the_last_eviction():
    model = MODELS["pro"]
    ids = torch.randint(0, SMALL["vocab_size"], (2, 400), generator=torch.Generator().manual_seed(1))
    cache, keeping = FoXCache(2, max_length=LONGEST), FoXCache(2)
    for one in (cache, keeping):
        model(ids[:, :300], cache=one)
    for refused, tokens, message in (
        (cache, 3, "keys were evicted at length 300, so the cache cannot go back to 297"),
        (cache, 301, "cannot remove 301 tokens"),
        (cache, -1, "cannot remove -1 tokens"),
        (keeping, 3, "token shift's inputs of 3 tokens ago are not held"),
    ):
        with pytest.raises(ValueError, match=message):
            refused.crop(tokens)
    cache.record_past()
    for _ in range(2):
        run_in_chunks(model, ids[:, 300:390], range(60, 90), cache)
        cache.crop(90)  # at most back to the last eviction
        with pytest.raises(ValueError, match="keys were evicted at length 300"):
            cache.crop(1)
    run_in_chunks(model, ids[:, 300:390], range(60, 90), cache)
    cache.crop(80)
    assert cache.length == 310
    found = run_in_chunks(model, ids[:, 310:], [40], cache)
    assert relative_error(found, model(ids)[:, 310:]) < 2e-5


@torch.no_grad()
def test_step_with_a_lower_delta_reads_blocks_skipped_before():
    """If delta may decrease, blocks are skipped for one step only."""
    generator, core, cache = torch.Generator().manual_seed(0), ForgettingAttentionCore(), FoXCache(1)
    q, k, v = torch.randn(3, 1, 2, 202, 16, generator=generator)
    gates, pruning = torch.full((1, 2, 202), -0.02), torch.full((1, 2), -1.0)
    errors = []
    for new, delta in ((range(200), pruning), (range(200, 201), pruning), (range(201, 202), None)):
        cache.begin(torch.zeros(1, len(new), dtype=torch.int64), None)
        out = cache.layers[0].attend(core, *(x[:, :, list(new)] for x in (q, k, v, gates)), delta)
        cache.count(len(new))
        right = core(q[:, :, : new.stop], *(x[:, :, : new.stop] for x in (k, v, gates)), None)
        errors.append(relative_error(out, right[:, :, list(new)]))
    assert min(errors[:2]) > 0.01 and errors[2] < 1e-6


@torch.no_grad()
def test_columns_without_a_block_read_finite_numbers(poisoned):
    """Their gate is 0, and in a product 0 times NaN is NaN."""
    cache = FoXCache(2, max_length=LONGEST)
    make_model()(torch.zeros(2, 40, dtype=torch.int64), cache=cache)
    for pool in (layer.pool for layer in cache.layers):
        assert all(x[0].isfinite().all() for x in (pool.k, pool.v, pool.c))


def test_pool_releases_memory_when_most_blocks_are_free():
    table = torch.arange(1, 241, dtype=torch.int32).view(2, 3, 40)
    pool = BlockPool(torch.zeros(2, 3, 1, 16), table, 240, torch.zeros(2, 2, 3, dtype=torch.int32))
    full = pool.allocated_bytes
    assert pool.evict(torch.full((2, 3), 38))
    assert pool.allocated_bytes < full / 4


def test_largest_key_norm_of_each_head_is_a_running_maximum():
    """With measured norms, the maximum bounds all past keys, so they need not be reread."""
    k, layer = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0)), FoXCache(1).layers[0]
    for first, end in itertools.pairwise((0, 5, 6, 9)):
        longest = layer.longest_key(k[:, :, first:end])
        assert torch.equal(longest.norm(dim=-1), k[:, :, :end].norm(dim=-1).amax(-1, keepdim=True))


@torch.no_grad()
def test_prefill_keeps_the_blocks_read_by_its_last_token():
    """Compares with the boundary of Algorithm 1 for that token, also for two chunks."""
    model = make_model("pro", -3.0, -0.3, log_pruning_tolerance=-10.0)
    ids = torch.randint(0, SMALL["vocab_size"], (2, 300), generator=torch.Generator().manual_seed(1))
    for length in (64, 300, *range(65, 95)):  # at some lengths, one gate decides
        whole, chunks, seen = FoXCache(2, max_length=LONGEST), FoXCache(2, max_length=LONGEST), []
        with watch_attention(model, lambda _, inputs, seen=seen: seen.append(inputs)):
            model(ids[:, :length], cache=whole)
        found = [inputs.boundary(1, BLOCK_SIZE)[..., -1] for inputs in seen]
        run_in_chunks(model, ids[:, :length], [length - 20], chunks)
        for cache in (whole, chunks):
            held = [layer.pool.first_resident_block for layer in cache.layers]
            assert all(torch.equal(a, b) for a, b in zip(held, found, strict=True))


@torch.no_grad()
def test_padding_blocks_are_not_allocated():
    """Global heads, which keep all other blocks, do not allocate padding either."""
    ids = torch.randint(0, SMALL["vocab_size"], (2, 300), generator=torch.Generator().manual_seed(1))
    cache = FoXCache(2, max_length=LONGEST)
    MODELS["pro"](ids, cache=cache, seq_start=torch.tensor([0, 200]))
    held = cache.memory().per_head[..., 1::2] // cache.layers[0].pool.block_bytes
    assert (held[:, 0] == 5).all() and (held[:, 1] == 5 - 200 // BLOCK_SIZE).all()


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["pro", "llama"])
def test_reading_the_past_row_by_row_equals_reading_all_rows_at_once(architecture, monkeypatch):
    model = make_model(architecture)
    ids = torch.randint(0, SMALL["vocab_size"], (3, 300), generator=torch.Generator().manual_seed(1))
    calls, found = [], []
    model.model.layers[0].attn.core.register_forward_hook(lambda *_: calls.append(1))
    for past_bytes, expected in ((2**29, 2), (1, 4)):  # the prefill, and the rest in one part or in three
        monkeypatch.setattr(layer_cache, "PAST_BYTES", past_bytes)
        cache = FoXCache(2, max_length=LONGEST)
        model(ids[:, :200], cache=cache, seq_start=torch.tensor([190, 0, 70]))
        found.append(model(ids[:, 200:], cache=cache))
        assert len(calls) == expected
        calls.clear()
    assert relative_error(found[1], found[0]) < 1e-5
