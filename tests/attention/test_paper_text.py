"""Tests of side remarks of the ACP paper about its method; REPRODUCTION.md refers to these tests."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.attention import (
    PagedKVCache,
    forgetting_attention,
    logit_bound_from_norms,
    pruning_threshold,
    reference,
)
from acp_repro.attention.boundary import find_boundary
from acp_repro.attention.decay import cumulative_log_fgate

GATES = {
    "mild": lambda x: -0.1 * x,
    "strong": lambda x: -20.0 * x,
    "open": torch.zeros_like,
    "closed": lambda x: torch.where(x > 0.95, -torch.inf, -1e-3),
}


def gates(kind: str, length: int, seed: int = 0) -> torch.Tensor:
    """Log forget gates (1, 1, T)."""
    return GATES[kind](torch.rand(1, 1, length, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("kind", GATES)
def test_decay_bias_is_monotone_in_both_coordinates(kind):
    length = 65
    bias = reference.decay_bias(gates(kind, length), length)[0, 0]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    assert (bias[1:] <= bias[:-1])[causal[:-1]].all()  # down a column
    assert (bias[:, 1:] >= bias[:, :-1])[causal[:, 1:]].all()  # along a row
    assert (bias.diagonal() == 0).all() and (bias[causal] <= 0).all()


@settings(max_examples=50, deadline=None)
@given(bound=st.floats(0, 50), below=st.floats(0, 500))
def test_bound_printed_in_section_3_is_never_below_one(bound, below):
    decay = -2 * bound - below
    assert 2 * bound - decay >= 0  # the logarithm of exp(2U - D)
    assert 2 * bound + decay == pytest.approx(-below)  # of exp(2U + D), which decreases with D


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(2, 70),
    scale=st.floats(0.1, 3.0),
    log_epsilon=st.sampled_from([-0.5, -10.0]),
)
def test_pruned_weights_are_at_most_epsilon_over_the_length(seed, length, scale, log_epsilon):
    generator = torch.Generator().manual_seed(seed)
    q, k = (scale * torch.randn(1, 1, length, 16, generator=generator).double() for _ in "qk")
    log_fgate = gates("strong", length, seed)
    delta = pruning_threshold(logit_bound_from_norms(q, k, 0.25), length, log_epsilon)
    weights = reference.attention_scores(q, k, log_fgate, sm_scale=0.25).softmax(-1)
    pruned = reference.decay_bias(log_fgate, length) < delta[..., None, None].double()
    assert not (weights[pruned] > math.exp(log_epsilon) / length).any()


def test_bfloat16_rounding_error_is_about_a_thousandth():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = ((x.bfloat16().double() - x) / x).abs().mean()
    assert 0.0005 < error < 0.005


def test_keys_and_values_of_pruned_blocks_are_not_read():
    generator = torch.Generator().manual_seed(0)
    length, forgotten = 512, 128
    q, k, v = (torch.randn(1, length, 1, 16, generator=generator) for _ in "qkv")
    log_fgate = torch.full((1, length, 1), -1e-3)
    log_fgate[:, forgotten] = -100.0  # later queries see no earlier key
    results = []
    for poison in (0.0, math.nan):
        inputs = [x.clone() for x in (q, k, v, log_fgate)]
        for x in inputs[1:3]:
            x[:, :forgotten] = poison
        inputs = [x.requires_grad_() for x in inputs]
        out = forgetting_attention(*inputs, adaptive_threshold=-50.0)[:, forgotten:]
        (gradient,) = torch.autograd.grad(out.sum(), inputs[0])
        results.append((out, gradient[:, forgotten:]))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned) and clean.isfinite().all()


def algorithm_1(c: list[float], delta: float, block: int, as_printed: bool) -> tuple[list[int], int]:
    """Algorithm 1 line by line, with indices from 1: the boundary, and how often line 5 tests a block.

    As printed, line 8 stores ``l`` after line 6 has increased it; otherwise it stores the block at which the
    loop ends, from which the next row continues.
    """
    boundary, looks, column = [], 0, 1
    for row in range(1, len(c) // block + 1):
        largest = -math.inf
        while largest < delta:
            last = min(column * block, len(c))
            largest = c[(row - 1) * block] - c[last - 1]
            looks += 1
            column += 1
        if not as_printed:
            column -= 1
        boundary.append(column)
    return boundary, looks


def running_sums(length: int = 256):
    return [(kind, cumulative_log_fgate(gates(kind, length))) for kind in ("mild", "strong", "open")]


def test_algorithm_1_as_printed_skips_boundary_blocks():
    for kind, c in running_sums():
        right = (find_boundary(c, torch.full((1, 1), -15.0), 256, 16, 16)[0, 0] + 1).tolist()
        assert algorithm_1(c[0, 0].tolist(), -15.0, 16, as_printed=False)[0] == right, kind
        printed = algorithm_1(c[0, 0].tolist(), -15.0, 16, as_printed=True)[0]
        assert all(p > r for p, r in zip(printed, right, strict=True)), kind


@pytest.mark.parametrize("kind", ["mild", "strong", "open"])
def test_decoding_boundary_is_never_before_the_training_boundary(kind):
    length, block, delta = 300, 16, torch.full((1, 1), -5.0)
    log_fgate = gates(kind, length)
    rows = find_boundary(cumulative_log_fgate(log_fgate), delta, length, block, block)[0, 0]
    cache = PagedKVCache.allocate(1, 1, length, 8, block_size=block)
    cache.c.fill_(math.nan)
    start, seen = cache.start_block, []
    for position in range(length):
        cache.seqlens[0] = position + 1
        cache.write(*torch.zeros(2, 1, 1, 1, 8), log_fgate[..., position : position + 1])
        cache.advance(start, delta, 1)
        seen.append(int(start))
    trained = rows.repeat_interleave(block)[:length]
    assert (torch.tensor(seen) >= trained).all()
    assert seen[::block] == rows.tolist()  # both prune the same at the first row of a block
    assert (max(seen) > 0) == (kind != "open")


def test_algorithm_1_visits_at_most_rows_plus_columns_blocks():
    for _, c in running_sums():
        for block in (4, 16, 64):
            looks = algorithm_1(c[0, 0].tolist(), -15.0, block, as_printed=False)[1]
            assert looks <= 2 * len(c[0, 0]) // block
