"""Grouped-query attention, and documents packed into one sequence, in every implementation.

Without a GPU the kernels run in Triton's interpreter.
"""

import pytest
import torch

from acp_repro.attention import forgetting_attention, logit_bound_from_qk_norm
from acp_repro.attention.boundary import find_boundary
from acp_repro.attention.decay import cumulative_log_fgate, cut_documents, documents_threshold

from .budgets import DEVICE, IMPLEMENTATIONS, NAMES, make_inputs, run

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def test_weight_bound_supports_grouped_key_heads():
    q_weight, k_weight = torch.ones(4 * 16), torch.ones(2, 16)
    k_weight[1] = 3.0
    bound = logit_bound_from_qk_norm(q_weight, k_weight.flatten(), 4, 16, num_kv_heads=2)
    assert torch.equal(bound[:2] * 3, bound[2:]) and bound.shape == (4,)
    with pytest.raises(ValueError, match="num_kv_heads must divide"):
        logit_bound_from_qk_norm(q_weight, torch.ones(16), 4, 16, num_kv_heads=3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_documents_do_not_affect_outputs_or_gradients(implementation):
    """A document is bitwise independent of the tokens and gradients of the others."""
    inputs, inside = make_inputs(100, 100, heads=1), slice(50, 80)
    options = {"cu_seqlens": torch.tensor([0, 50, 80, 100], dtype=torch.int32, device=DEVICE)}
    expected, _ = run(inputs, implementation, **options)
    other = [x.clone() for x in inputs]
    for n, value in ((0, 20.0), (1, 20.0), (2, -7.0), (4, 9.0)):
        keep = other[n][:, :, inside].clone()
        other[n].fill_(value)
        other[n][:, :, inside] = keep
    other[3][..., 50] = 0.0  # the gate at a document's first token has no effect
    found, _ = run(other, implementation, **options)
    for name in NAMES[:4]:
        assert torch.equal(found[name][:, :, inside], expected[name][:, :, inside]), name
    # A gate's gradient is a running sum from the end; later documents cancel up to rounding.
    a, b = (x["dlog_fgate"][..., inside] for x in (found, expected))
    assert (a - b).norm() < 1e-4 * b.norm()


def test_many_documents_preserve_precision():
    """4,096 document starts lower c to -4e7; differences within a document remain accurate."""
    log_fgate = -torch.rand(1, 1, 16384) * 1e-3
    cut = cut_documents(log_fgate, torch.arange(0, 16385, 4))
    c = cumulative_log_fgate(cut)
    inside = (c[..., 3::4] - c[..., ::4]).flatten()
    expected = log_fgate.double().view(-1, 4)[:, 1:].sum(1)
    assert (inside - expected).abs().max() < 1e-7
    boundary = find_boundary(c, documents_threshold(None, cut), 16384, 64, 64)
    assert torch.equal(boundary[0, 0], torch.arange(256, dtype=torch.int32))


def test_packed_documents_with_huge_scores_are_rejected():
    whole = {"head_first": True, "cu_seqlens": torch.tensor([0, 8])}
    inputs = make_inputs(8, 8, device="cpu")[:4]
    inputs[0][:], inputs[1][:] = 24.7, 24.7  # norms of 24.7 sqrt(16), so 2 U is 4,881
    forgetting_attention(*inputs, **whole)
    inputs[0][:] = 24.9
    with pytest.raises(ValueError, match=r"cu_seqlens must be in \[0, 4900.0\]"):
        forgetting_attention(*inputs, **whole)
