"""Appendices A and E: the bounds hold for rounded q and k, and the pruned mass is less than epsilon."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.attention import (
    forgetting_attention,
    logit_bound_from_norms,
    logit_bound_from_qk_norm,
    pruning_threshold,
    reference,
)
from acp_repro.attention.boundary import count_blocks, find_boundary
from acp_repro.attention.decay import cumulative_log_fgate


def adversarial_inputs(seed, seqlen, head_dim, scale, mean_gate, aligned):
    """q, k (1, 2, T, D) and gates. ``aligned`` makes the pruned keys the best match of every query and
    the query's own key the worst, the case in which Appendix A's inequality is nearly met."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 2, seqlen, head_dim, generator=generator)
    k = torch.randn(1, 2, seqlen, head_dim, generator=generator)
    log_fgate = -torch.rand(1, 2, seqlen, generator=generator) * mean_gate
    if aligned:
        direction = torch.nn.functional.normalize(torch.randn(head_dim, generator=generator), dim=0)
        q = direction.expand(1, 2, seqlen, head_dim).clone()
        k = q.clone()
        k[..., seqlen // 2 :, :] *= -1
        log_fgate.zero_()
        log_fgate[..., seqlen // 2] = -2.2 * scale**2 * math.sqrt(head_dim) - 2 * mean_gate
    return q * scale * math.sqrt(head_dim), k * scale, log_fgate


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    seqlen=st.integers(2, 70),
    head_dim=st.sampled_from([16, 24]),
    scale=st.floats(0.1, 4.0),
    mean_gate=st.floats(0.0, 30.0),
    aligned=st.booleans(),
    log_epsilon=st.sampled_from([-0.5, -1.0, -10.0]),
    block=st.sampled_from([1, 3, 8]),
    low_precision=st.booleans(),
)
def test_pruned_weights_of_every_row_sum_below_epsilon(
    seed, seqlen, head_dim, scale, mean_gate, aligned, log_epsilon, block, low_precision
):
    q, k, log_fgate = adversarial_inputs(seed, seqlen, head_dim, scale, mean_gate, aligned)
    if low_precision:
        q, k = q.bfloat16(), k.bfloat16()
    sm_scale = 1 / math.sqrt(head_dim)
    threshold = pruning_threshold(logit_bound_from_norms(q, k, sm_scale), seqlen, log_epsilon)
    boundary = find_boundary(cumulative_log_fgate(log_fgate), threshold, seqlen, block, block)
    kept = reference.kept_entries(boundary, seqlen, seqlen, block, block)
    mass = reference.pruned_mass(q, k, log_fgate, kept, sm_scale=sm_scale)
    assert mass.max() < math.exp(log_epsilon)


def test_worst_case_nearly_reaches_the_bound():
    """With a 20 times larger epsilon, the adversarial case exceeds the bound."""
    seqlen, scale, sm_scale = 64, 1.5, 0.25
    q, k, log_fgate = adversarial_inputs(0, seqlen, 16, scale, 0.0, aligned=True)
    bound = logit_bound_from_norms(q, k, sm_scale)
    log_fgate[..., seqlen // 2] = (pruning_threshold(bound, seqlen, -1.0) - 1e-3)[..., :1]
    mass = {}
    for log_epsilon in (-1.0, -1.0 + math.log(20)):
        threshold = -2 * bound - math.log(seqlen) + log_epsilon
        boundary = find_boundary(cumulative_log_fgate(log_fgate), threshold, seqlen, 1, 1)
        kept = reference.kept_entries(boundary, seqlen, seqlen, 1, 1)
        mass[log_epsilon] = reference.pruned_mass(q, k, log_fgate, kept, sm_scale=sm_scale).max()
    assert math.exp(-1) / 20 < mass[-1.0] < math.exp(-1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    shared=st.booleans(),
    gain=st.floats(0.05, 8.0),
)
def test_qk_norm_bound_covers_the_rounded_products(seed, dtype, shared, gain):
    heads, head_dim, seqlen = 3, 16, 12
    generator = torch.Generator().manual_seed(seed)
    size = head_dim if shared else heads * head_dim
    weights = [torch.randn(size, generator=generator) * gain for _ in range(2)]
    scores = []
    for weight in weights:
        x = torch.randn(seqlen, heads, head_dim, generator=generator)
        # One-hot rows in the direction of the largest weight: the bound's equality case.
        per_head = weight.view(-1, head_dim).expand(heads, head_dim)
        x[0] = torch.nn.functional.one_hot(per_head.abs().argmax(-1), head_dim) * 7.3
        x = x.to(dtype).float()
        x = (x / x.square().mean(-1, keepdim=True).sqrt()).to(dtype)
        scores.append((x * per_head.to(dtype)).double())
    largest = torch.einsum("ihd,jhd->hij", *scores).abs().amax((1, 2)) / math.sqrt(head_dim)
    bound = logit_bound_from_qk_norm(*weights, heads, head_dim, dtype=dtype)
    assert bound.shape == (heads,) and bound.dtype == torch.float32
    assert (bound.double() >= largest).all()
    # The bound is at most the product of the largest norms plus rounding, so U does not count twice.
    norms = [x.norm(dim=-1).amax(0) for x in scores]
    assert (bound.double() <= norms[0] * norms[1] / math.sqrt(head_dim) * 1.05).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    head_dim=st.sampled_from([16, 64, 256]),
)
def test_norm_bound_covers_every_score(seed, dtype, head_dim):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 3, 9, head_dim, generator=generator).to(dtype)
    k = q.clone()  # q.k = ||q||^2, the equality case of Cauchy-Schwarz
    bound = logit_bound_from_norms(q, k)
    scores = (q.double() @ k.double().mT).abs().amax((2, 3)) / math.sqrt(head_dim)
    assert (bound.double() >= scores).all() and (bound.double() <= scores * 1.001).all()


MAGNITUDES = [
    (1e-23, 1e18, 1e5, torch.float32),
    (1e-40, 3e37, None, torch.bfloat16),
    (1e25, 1e-30, 3.0, torch.float32),
    (1e-25, 1e-20, 1e30, torch.bfloat16),
    (1e-170, 1e150, 1e20, torch.float64),
]


@pytest.mark.parametrize(("q_size", "k_size", "sm_scale", "dtype"), MAGNITUDES)
def test_norm_bound_covers_scores_of_every_magnitude(q_size, k_size, sm_scale, dtype):
    """Squares underflow or overflow in float32. Head 1 has ordinary magnitudes and keeps its own bound."""
    q = torch.randn(2, 2, 9, 24, generator=torch.manual_seed(0), dtype=torch.float64)
    size = torch.tensor([[q_size, k_size], [1.0, 1.0]], dtype=torch.float64)
    q, k = ((q * size[:, n, None, None]).to(dtype) for n in range(2))
    bound = logit_bound_from_norms(q, k, sm_scale).double()
    largest = (q.double() @ k.double().mT).abs().amax((2, 3)) * (sm_scale or 24**-0.5)
    assert (bound >= largest).all()
    tight = bound <= largest * 1.2
    assert tight[:, 1].all() and (tight[:, 0].all() or min(q_size, k_size, q_size * k_size) < 1e-38)


def test_bounds_cover_sequentially_accumulated_scores():
    """Every product after the first is rounded up, which is the worst case for a sum of 256 products."""
    x = torch.full((256,), math.sqrt(2.0**-24 * 1.001))
    x[0] = 1.0
    computed = (x * x).tolist()[0] * torch.ones(())
    for product in (x * x)[1:]:
        computed = computed + product
    assert computed > x.double().square().sum() + 200 * 2.0**-24
    rows = x.expand(1, 1, 3, 256)
    assert logit_bound_from_norms(rows, rows, 1.0) >= computed
    # The same rows after QK-norm in float32, whose squares sum to 256.
    of_weights = logit_bound_from_qk_norm(torch.ones(256), torch.ones(256), 1, 256, 1.0, torch.float32)
    assert of_weights >= computed.double() * 256 / x.double().square().sum()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "weight"), [(torch.bfloat16, 75, 1 + 6 / 128), (torch.float16, 68, 1 + 48 / 1024)]
)
def test_qk_norm_bound_counts_roundings_exactly(dtype, head_dim, weight):
    """Value, weight and product are rounded up by nearly the maximum, so five roundings would not suffice."""
    unit = torch.finfo(dtype).eps / 2
    weight = torch.tensor(weight - unit).nextafter(torch.tensor(2.0))  # the smallest value that rounds up
    value = torch.tensor(math.sqrt(head_dim), dtype=torch.float64).to(dtype)
    score = (value * weight.to(dtype)).double() ** 2
    weights = torch.zeros(head_dim)
    weights[3] = weight
    bound = logit_bound_from_qk_norm(weights, weights, 1, head_dim, 1.0, dtype).double()
    assert score <= bound <= score * (1 + unit)


def test_threshold_is_rounded_outwards_within_its_rounding_error():
    bound = torch.rand(20_000, dtype=torch.float64, generator=torch.manual_seed(0)) * 4
    exact = -2 * bound - 16.3
    assert ((-2 * bound.float() - 16.3).double() > exact).any()
    delta = pruning_threshold(bound, 1, -16.3).double()
    assert (delta <= exact).all() and (delta >= exact * (1 + 2**-21)).all()


def test_query_with_overflowing_norm_prunes_nothing():
    """U is infinite in float32, so "auto" visits every block."""
    q, k, v = torch.ones(3, 1, 130, 1, 16)
    log_fgate = torch.full((1, 130, 1), -50.0)
    options = {"adaptive_threshold": "auto", "return_start_index": True}
    _, start = forgetting_attention(q * 1e30, k * 1e30, v, log_fgate, sm_scale=1e-30, **options)
    assert not start.any()
    _, start = forgetting_attention(q, k, v, log_fgate, **options)
    assert start.any()
    q[0, 7, 0, 3] = math.inf
    assert logit_bound_from_norms(q.transpose(1, 2), k.transpose(1, 2)).item() == math.inf


def test_default_device_has_no_effect():
    q, k, v = torch.randn(3, 1, 130, 1, 16, generator=torch.manual_seed(0))
    log_fgate = torch.full((1, 130, 1), -1.0)
    options = {"adaptive_threshold": "auto", "return_start_index": True}
    expected = forgetting_attention(q, k, v, log_fgate, **options)
    counts = count_blocks(expected[1], 130, 130, 64, 64)
    with torch.device("meta"):
        found = forgetting_attention(q, k, v, log_fgate, **options)
        assert count_blocks(expected[1], 130, 130, 64, 64).causal == counts.causal
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_threshold_formula_and_errors():
    delta = pruning_threshold(torch.tensor([2.0, 0.0]), 4096, -10.0)
    torch.testing.assert_close(delta, torch.tensor([-4.0, 0.0]) - math.log(4096) - 10.0)
    for arguments, message in (
        ((1.0, 10, 0.5), "log_pruning_tolerance .* negative"),
        ((1.0, 0), "seqlen must be at least 1"),
        ((1.0, 2.5), "seqlen must be at least 1 and an integer.* got 2.5"),
        ((-1e-3, 10), "logit_bound U must be in"),
        ((torch.tensor([1.0, math.inf]), 10), "logit_bound U must be in"),
        ((math.nan, 10), "logit_bound U must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            pruning_threshold(*arguments)
    with pytest.raises(ValueError, match=r"q_weight must have shape \(16,\) or \(48,\)"):
        logit_bound_from_qk_norm(torch.ones(5), torch.ones(16), 3, 16)
