"""Section 3: the boundary is monotone, the parallel search equals Algorithm 1, and block counts are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.attention.boundary import (
    attention_bytes,
    attention_flops,
    causal_blocks,
    count_blocks,
    find_boundary,
    find_boundary_serial,
    token_level_pruned_ratio,
)
from acp_repro.attention.decay import cumulative_log_fgate, log_fgate_grad

gates = st.sampled_from(["mild", "strong", "zero", "steps", "closed"])


def make_c(kind, seed, batch, heads, seqlen):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, heads, seqlen, generator=generator)
    log_fgate = {
        "mild": -0.1 * x,
        "strong": -20.0 * x,
        "zero": torch.zeros_like(x),
        "steps": torch.where(x > 0.9, -15.0, 0.0),  # runs of equal c: ties with the threshold
        "closed": torch.where(x > 0.95, -torch.inf, -1e-3),
    }[kind]
    return cumulative_log_fgate(log_fgate)


@settings(max_examples=150, deadline=None)
@given(
    kind=gates,
    seed=st.integers(0, 10_000),
    seqlen_k=st.integers(1, 140),
    missing=st.integers(0, 139),
    block_q=st.sampled_from([1, 4, 7, 16, 64]),
    block_k=st.sampled_from([1, 4, 5, 16, 64]),
    delta=st.sampled_from([0.0, -1e-3, -15.0, -30.0, -1e5]),
)
def test_parallel_search_equals_algorithm_1(kind, seed, seqlen_k, missing, block_q, block_k, delta):
    seqlen_q = max(1, seqlen_k - missing)
    c = make_c(kind, seed, 2, 2, seqlen_k)
    threshold = torch.tensor([[delta, delta / 2], [delta * 2, delta]])
    serial = find_boundary_serial(c, threshold, seqlen_q, block_q, block_k)
    parallel = find_boundary(c, threshold, seqlen_q, block_q, block_k)
    assert torch.equal(serial, parallel)

    assert (parallel.diff(dim=-1) >= 0).all()
    first = torch.arange(0, seqlen_q, block_q) + seqlen_k - seqlen_q
    assert (parallel <= first // block_k).all() and (parallel >= 0).all()
    # Definition: all entries left of the boundary are below delta, and an entry of the boundary block is not.
    for b, h in ((0, 0), (1, 1)):
        for m, position in enumerate(first.tolist()):
            edge = int(parallel[b, h, m])
            decay = c[b, h, position] - c[b, h]
            assert (decay[: edge * block_k] < threshold[b, h]).all()
            assert decay[edge * block_k : (edge + 1) * block_k].max() >= threshold[b, h]


def test_padding_blocks_are_skipped_and_nan_prunes_nothing():
    c = torch.zeros(2, 1, 32, dtype=torch.float64)
    boundary = find_boundary(c, None, 32, 8, 4, seq_start=torch.tensor([0, 13]))
    assert boundary[0, 0].tolist() == [0, 0, 0, 0]
    assert boundary[1, 0].tolist() == [0, 2, 3, 3]  # at most the block of the first query
    # With a threshold, the later of the two boundaries applies.
    fallen = torch.arange(32).mul(-1.0).double()[None, None].expand(2, 1, 32)
    both = find_boundary(fallen, torch.full((2, 1), -6.5), 32, 8, 4, seq_start=torch.tensor([0, 13]))
    assert both[:, 0].tolist() == [[0, 0, 2, 4], [0, 2, 3, 4]]
    c[0, 0, 10:] = torch.nan
    boundary = find_boundary(c, torch.full((2, 1), -5.0), 32, 8, 4)
    assert boundary.tolist() == [[[0, 0, 0, 0]]] * 2


def test_block_counts_flops_and_bytes_match_a_hand_computation():
    boundary = torch.tensor([[[0, 0, 1, 2]]], dtype=torch.int32)
    assert causal_blocks(129, 129, 64, 64) == 6 and causal_blocks(4, 6, 2, 1) == 10
    count = count_blocks(boundary, 256, 256, 64, 64)
    assert count.pruned.tolist() == [[3]] and count.causal == 10
    assert count.pruned_ratio.tolist() == [[0.3]]
    assert attention_flops(7, 64, 64, 32, backward=False) == 7 * 4 * 64 * 64 * 32
    assert attention_flops(7, 64, 64, 32, backward=True) == 7 * 10 * 64 * 64 * 32
    assert attention_bytes(7, 64, 32, 2) == 7 * 2 * 64 * 32 * 2
    c = cumulative_log_fgate(torch.full((1, 1, 4), -1.0))
    # D = 0 on the diagonal, -1, -2, -3 below it: delta = -1.5 prunes the last two, 2 + 1 entries of 10.
    assert token_level_pruned_ratio(c, torch.tensor([[-1.5]])).item() == pytest.approx(0.3)


def test_running_sum_is_exact_at_128k_strong_gates_and_its_adjoint_matches_autograd():
    c = cumulative_log_fgate(torch.full((1, 1, 131_072), -10.3))
    assert torch.equal(c.diff(), torch.full_like(c.diff(), c[0, 0, 0].item()).to(c.dtype)) or (
        (c.diff() - c[0, 0, 0]).abs().max() < 1e-9
    )
    log_fgate = (-torch.rand(2, 3, 50)).requires_grad_()
    dc = torch.randn(2, 3, 50)
    (expected,) = torch.autograd.grad(log_fgate.double().cumsum(-1), log_fgate, dc.double())
    torch.testing.assert_close(log_fgate_grad(dc, log_fgate.detach()), expected)
    closed = torch.tensor([[[-1.0, -torch.inf, -2.0]]])
    assert cumulative_log_fgate(closed).tolist() == [[[-1.0, -10001.0, -10003.0]]]
    assert log_fgate_grad(torch.ones(1, 1, 3), closed).tolist() == [[[3.0, 0.0, 1.0]]]
