"""The kernels of the running sum of the gates and its adjoint, against the functions that define them."""

import math

import pytest
import torch

from acp_repro.attention import decay, pruning_threshold

pytest.importorskip("triton", reason="pip install triton")

from acp_repro.attention.triton import gates, norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("length", [1, 63, 2048, 2049, 5000])
def test_sum_and_adjoint(length):
    generator = torch.Generator().manual_seed(0)
    public = -torch.rand(2, length, 3, generator=generator)
    public[:, :: max(1, length // 3), 1] = -torch.inf
    public[:, -1:, 0] = -2e4
    log_fgate = public.to(DEVICE).transpose(1, 2)  # strides as in the public layout
    c = gates.cumulative_log_fgate(log_fgate)
    expected = decay.cumulative_log_fgate(log_fgate)
    assert c.dtype == torch.float64 and c.is_contiguous()
    torch.testing.assert_close(c, expected, rtol=1e-14, atol=1e-12)
    assert torch.equal(c, gates.cumulative_log_fgate(log_fgate.contiguous()))

    dc = torch.randn(2, 3, length, generator=generator).to(DEVICE)
    grad = gates.log_fgate_grad(dc, log_fgate)
    assert grad.dtype == torch.float32 and (grad[log_fgate < decay.LOG_FGATE_FLOOR] == 0).all()
    torch.testing.assert_close(grad, decay.log_fgate_grad(dc, log_fgate), rtol=1e-6, atol=1e-6)


def test_nan_propagates_and_empty_input_stays_empty():
    log_fgate = torch.zeros(1, 1, 4, device=DEVICE)
    log_fgate[..., 2] = torch.nan
    assert gates.cumulative_log_fgate(log_fgate).isnan().tolist() == [[[False, False, True, True]]]
    empty = torch.zeros(2, 3, 0, device=DEVICE)
    assert gates.cumulative_log_fgate(empty).shape == gates.log_fgate_grad(empty, empty).shape


@pytest.mark.parametrize("length", [1, 127, 129, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.float32, 1), (torch.bfloat16, 4)])
def test_threshold_from_norms_matches_its_unfused_steps(length, dtype, kv_heads):
    q, k = (torch.randn(2, h, length, 48, device=DEVICE).to(dtype) for h in (4, kv_heads))
    k = torch.cat((k, 2 * k), 2)
    factor = 0.3
    found = norms.threshold_from_norms(q, k, factor, -10.0)
    longest = [x.double().norm(dim=-1).amax(-1) for x in (q, k.repeat_interleave(4 // kv_heads, 1))]
    right = pruning_threshold(longest[0] * longest[1] * factor, 2 * length)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=0)
    q[1, 2, length // 2, 5] = torch.nan
    found = norms.threshold_from_norms(q, k, factor, -10.0)
    assert found.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_size", "k_size", "factor"), [(1e-23, 1e18, 1e5), (1e-37, 1e15, 3e18)])
def test_threshold_from_norms_of_small_rows(q_size, k_size, factor, dtype):
    """Squares underflow in float32, NaN propagates, and head 1 has ordinary magnitudes."""
    q = torch.randn(1, 2, 150, 24, device=DEVICE, dtype=torch.float64)
    size = torch.tensor([[q_size, k_size], [1.0, 1.0]], dtype=torch.float64, device=DEVICE)
    q, k = ((q * size[:, n, None, None]).to(dtype) for n in range(2))
    found = norms.threshold_from_norms(q, k, factor, -10.0)
    longest = [x.double().norm(dim=-1).amax(-1) for x in (q, k)]
    exact = -2 * longest[0] * longest[1] * factor - math.log(150) - 10
    least = -2 * longest[0].clamp(min=2.0**-126) * longest[1] * factor - math.log(150) - 10
    assert (found <= exact * (1 - 1e-5)).all() and (found >= least * (1 + 1e-5)).all()
    q[0, 0, 140, 5] = torch.nan
    assert norms.threshold_from_norms(q, k, factor, -10.0).isnan().tolist() == [[True, False]]


def test_subnormal_norms_are_not_rounded_down():
    q, k = torch.zeros(2, 1, 1, 1, 16, device=DEVICE)
    q[..., :2], k[..., 0] = 2.0**-149, 1e38  # a norm of sqrt(2) subnormal steps
    found = norms.threshold_from_norms(q, k, 1e8, -10.0).item()
    assert found <= -2 * math.sqrt(2) * 2.0**-149 * 1e46 - 10


def test_threshold_from_norms_is_rounded_outwards():
    """The only query of each head has a known norm, and the factor is rounded down by nearly the maximum."""
    bound, factor = torch.rand(20_000, generator=torch.manual_seed(0)) * 4, 1 + 0.99 * 2**-24
    # Half the margin would be too small for some of these norms.
    half = (-2 * bound - 16.3) * (1 + 2**-23)
    bound = bound[half.double() > -2 * bound.double() * factor - 16.3][:5].to(DEVICE)
    q, k = (torch.zeros(1, 5, 1, 16, device=DEVICE) for _ in range(2))
    q[0, :, 0, 0], k[..., 0] = bound, 1.0
    found = norms.threshold_from_norms(q, k, factor, -16.3)[0].double()
    exact = -2 * bound.double() * factor - 16.3
    assert (found <= exact).all() and (found >= exact * (1 + 2**-21)).all()
