"""The Triton kernels against the equations in float64, with the same boundary.

Without a GPU, the same tests run in Triton's interpreter at small sizes. The error budget of every output is
1.1 times the error of eager PyTorch in the same dtype on the same inputs (`attend` with ``dtype``: products
in the dtype, softmax in float32), plus 1e-6. The error of a gate gradient is a sum of rounding errors with
random signs, and two such sums are compared, so its budget is twice the error plus 3e-6. The interpreter
truncates float32 to bfloat16 instead of rounding, which doubles the error of a conversion and the budget.
"""

import math

import pytest
import torch

from acp_repro.attention.backends import find_backend
from acp_repro.attention.boundary import find_boundary, find_boundary_serial

pytest.importorskip("triton", reason="pip install triton")

from acp_repro.attention import triton as kernels
from acp_repro.attention.triton import tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SMALLER = DEVICE == "cpu"  # the interpreter needs seconds per tile
needs_gpu = pytest.mark.skipif(
    DEVICE == "cpu", reason="needs a CUDA GPU: run make test-gpu on a machine with one"
)
NAMES = ("out", "dq", "dk", "dv", "dc")


def attend(inputs, boundary, seq_start, sm_scale, block_q, block_k, dtype=torch.float64):
    """out, dq, dk, dv, dc and lse of ``inputs`` (dout, q, k, v, c) by the equations, some rows at a time.

    In float64 this is the exact result, in another dtype the result of eager PyTorch.
    """
    dout, q, k, v = (x.to(dtype) for x in inputs[:4])
    c = inputs[4]
    wide = torch.promote_types(dtype, torch.float32)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    shift = seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k, device=q.device)
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    dc = torch.zeros_like(c, dtype=wide)
    lse = torch.zeros(q.shape[:3], dtype=wide, device=q.device)
    step = max(1, 2**25 // (seqlen_k * q.shape[0] * q.shape[1]))
    for first in range(0, seqlen_q, step):
        rows = torch.arange(first, min(first + step, seqlen_q), device=q.device)
        kept = keys <= rows[:, None] + shift
        kept = kept & (keys // block_k >= boundary[:, :, rows // block_q, None])
        if seq_start is not None:
            kept = kept & (keys >= seq_start[:, None, None, None])
        decay = (c[:, :, rows + shift, None] - c[:, :, None, :]).to(wide)
        scores = (q[:, :, rows] @ k.mT * sm_scale).to(wide) + decay
        scores = scores.masked_fill(~kept, -math.inf)
        lse[:, :, rows] = scores.logsumexp(-1)
        finite = lse[:, :, rows].nan_to_num(neginf=0.0)
        p = torch.exp(scores - finite[..., None])
        out[:, :, rows] = p.to(dtype) @ v
        dp = (dout[:, :, rows] @ v.mT).to(wide)
        delta = (dout[:, :, rows].to(wide) * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        ds = p * (dp - delta)
        dq[:, :, rows] = ds.to(dtype) @ k * sm_scale
        dk += ds.to(dtype).mT @ q[:, :, rows] * sm_scale
        dv += p.to(dtype).mT @ dout[:, :, rows]
        dc[:, :, rows + shift] += ds.sum(-1)
        dc -= ds.sum(-2)
    return out, dq, dk.to(dtype), dv.to(dtype), dc, lse


def run(inputs, boundary, seq_start, sm_scale, block_q, block_k):
    """Runs the kernels; returns the results of `attend`."""
    dout, q, k, v, c = inputs
    grid = (boundary, seq_start, sm_scale, block_q, block_k)
    out, lse = kernels.forward(q, k, v, c, *grid)
    dq, dk, dv, dc = kernels.backward(dout, q, k, v, out, lse, c, *grid)
    return out, dq, dk, dv, dc, lse.double() * math.log(2)


def make_inputs(seqlen_q, seqlen_k, head_dim, dtype, batch=2, heads=2, strength=1.0, seed=0):
    """(dout, q, k, v, c) in the public layout, transposed; even heads local, odd ones global."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(length):
        shape = (batch, length, heads, head_dim)
        x = torch.randn(shape, generator=generator, device=DEVICE)
        return x.to(dtype).transpose(1, 2)

    mean = torch.where(torch.arange(heads, device=DEVICE) % 2 == 0, 0.3, 1e-4) * strength
    log_fgate = torch.empty(batch, heads, seqlen_k, device=DEVICE).exponential_(generator=generator)
    c = (log_fgate * -mean[:, None]).double().clamp(min=-1e4).cumsum(-1)
    return [draw(seqlen_q), draw(seqlen_q), draw(seqlen_k), draw(seqlen_k), c]


def boundary_for(c, seqlen_q, block_q, block_k, seq_start=None, delta=-12.0):
    threshold = torch.full(c.shape[:2], delta, device=c.device)
    return kernels.find_boundary(c, threshold, seqlen_q, block_q, block_k, seq_start)


def error(actual, expected):
    actual, expected = actual.double(), expected.double()
    assert actual.isfinite().all()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def gate_gradient(dc):
    """dL / d log f_l = sum_{i >= l} dc_i."""
    return dc.double().flip(-1).cumsum(-1).flip(-1)


def check(inputs, boundary, seq_start, sm_scale, block_q, block_k, actual=None):
    """All outputs, gradients and per-head gate gradients are within the budget."""
    grid = (boundary, seq_start, sm_scale, block_q, block_k)
    dtype = inputs[0].dtype
    actual = run(inputs, *grid) if actual is None else actual
    truth = attend(inputs, *grid)
    eager = attend(inputs, *grid, dtype=dtype)
    loose = 2.0 if DEVICE == "cpu" and dtype == torch.bfloat16 else 1.0

    def judge(name, a, t, e, more=1.1, least=1e-6):
        budget = loose * more * error(e, t) + least
        assert error(a, t) <= budget, f"{name}: {error(a, t):.2e} over {budget:.2e}"

    for name, a, t, e in zip(NAMES, actual, truth, eager, strict=False):
        judge(name, a, t, e)
    for head in range(inputs[4].shape[1]):
        judge(
            f"dlog_fgate of head {head}",
            *(gate_gradient(x[4][:, head]) for x in (actual, truth, eager)),
            more=2.0,
            least=3e-6,
        )
    lse, expected = actual[5], truth[5]
    empty = expected == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    torch.testing.assert_close(lse[~empty].double(), expected[~empty], atol=2e-5, rtol=1e-6)
    for x in actual[:2]:
        assert (x[empty] == 0).all()


def packed_inputs(seqlen_q, seqlen_k, head_dim, dtype):
    """Inputs whose two heads share their keys. In row 1, no head keeps the first keys at delta = -2."""
    inputs = make_inputs(seqlen_q, seqlen_k, head_dim, dtype)
    inputs[2:4] = (x[:, :1].expand(-1, 2, -1, -1) for x in inputs[2:4])
    # Constant gates, so that the boundary is the same on every device. A block before the first kept one of
    # head 0 has weights of about exp(-3); c of head 1 falls by 2 in seqlen_q tokens.
    falls = torch.tensor([0.05, 2 / seqlen_q], dtype=torch.float64, device=DEVICE)
    inputs[4][1] = -falls[:, None] * torch.arange(seqlen_k, device=DEVICE)
    return inputs


def run_packed(inputs, *grid):
    """:func:`run` with the keys of each row from its first kept key on, in one matrix for all rows."""
    dout, q, k, v, c = inputs
    first = grid[0].amin((1, 2)).long() * grid[-1]
    assert 0 < first[1] < grid[0][1, 0, 0] * grid[-1]
    k, v = (torch.cat([x[b, :1, n:] for b, n in enumerate(first)], 1)[None] for x in (k, v))
    origin = torch.stack((-first[0], c.shape[2] - first.sum()))
    packed = torch.stack((origin, first), 1)
    out, lse = kernels.forward(q, k, v, c, *grid, packed=packed)
    dq, *shares, dc = kernels.backward(dout, q, k, v, out, lse, c, *grid, shares=True, packed=packed)
    parts = (zip(x[0].split((c.shape[2] - first).tolist(), 1), first.tolist(), strict=True) for x in shares)
    dk, dv = (torch.stack([torch.nn.functional.pad(x, (0, 0, n, 0)) for x, n in part]) for part in parts)
    return out, dq, dk, dv, dc, lse.double() * math.log(2)


def slow(*values):
    """Parameters of an additional size that only the full test run includes."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("padded", [False, True])
def test_packed_keys(padded):
    """Rows that start at different keys of one matrix; no result differs from that of separate keys."""
    inputs = packed_inputs(128, 320, 16, torch.float32)
    seq_start = torch.tensor([200, 230], device=DEVICE) if padded else None
    grid = (boundary_for(inputs[4], 128, 64, 64, delta=-2.0), seq_start, 0.25, 64, 64)
    actual = run_packed(inputs, *grid)
    check(inputs, *grid, actual=actual)
    assert all(map(torch.equal, actual, run(inputs, *grid)))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "dtype", "padded"),
    [
        (1, 1, 16, torch.float32, True),
        slow(63, 63, 48, torch.float32, False),
        slow(65, 65, 64, torch.bfloat16, True),
        slow(129, 129, 64, torch.float16, False),
        slow(129, 129, 128, torch.bfloat16, True),
        (65, 130, 16, torch.bfloat16, True),
        (1, 129, 64, torch.float32, False),
        slow(130, 333, 20, torch.float32, True),
        slow(64, 64, 256, torch.bfloat16, False),
    ],
)
def test_every_output_and_gradient(seqlen_q, seqlen_k, head_dim, dtype, padded):
    inputs = make_inputs(seqlen_q, seqlen_k, head_dim, dtype)
    grid = find_backend("triton").block_sizes(head_dim, dtype)
    seq_start = None
    if padded:
        seq_start = torch.tensor([0, min(77, seqlen_k - 1)], device=DEVICE)
    boundary = boundary_for(inputs[4], seqlen_q, *grid, seq_start)
    check(inputs, boundary, seq_start, head_dim**-0.5, *grid)


@pytest.mark.parametrize("grid", [slow((16, 16)), slow((64, 16)), slow((128, 128)), (48, 80)])
def test_any_launch_grid_is_supported(grid):
    length, more, width = (70, 200, 16) if SMALLER else (150, 200, 32)
    inputs = make_inputs(length, length + more, width, torch.float32, batch=1)
    boundary = boundary_for(inputs[4], length, *grid, delta=-1.0)
    assert boundary.max() > 0
    check(inputs, boundary, None, 0.2, *grid)


def single_key_inputs(length, head_dim, dtype):
    """Inputs (dout, q, k, v, c) with norms about 300, where each query gives all weight to its own key.

    Scores are sums of integers, so they are exact in any order of summation.
    """
    dout, q, _, v, c = make_inputs(length, length, head_dim, dtype)
    large = torch.arange(length, device=DEVICE)[:, None] % 8 + 34.0
    q = torch.where(q > 0, large, -large).to(dtype)
    return [dout, q, q.clone(), v, c]


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float16), torch.bfloat16])
def test_weight_of_1_is_exact_in_both_passes(dtype):
    """Scores near 10,000: the backward pass computes weights from scores and lse, and one rounding of lse
    changes a weight by a thousandth."""
    inputs = single_key_inputs(70, 64, dtype)
    boundary = torch.zeros(2, 2, 2, dtype=torch.int32, device=DEVICE)
    out, _, _, dv, *_ = run(inputs, boundary, None, 0.11, 64, 64)  # five of the eight scores would change
    assert torch.equal(out, inputs[3]) and torch.equal(dv, inputs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_with_overflowing_weights_are_recomputed(dtype):
    """Two rows give nearly all weight to a key far before the diagonal, where the running maximum was set."""
    inputs = make_inputs(64, 330, 16, dtype, batch=1, heads=1)
    inputs[1][:, :, 20:22] = 6
    inputs[2][:, :, 3] = 6
    inputs[4] *= 1e-3  # the decay does not reduce the weight of that key
    boundary = torch.zeros(1, 1, 1, dtype=torch.int32, device=DEVICE)
    out, lse = kernels.forward(*inputs[1:], boundary, None, 0.5, 64, 64)
    truth = attend(inputs, boundary, None, 0.5, 64, 64)
    assert error(out[:, :, 20:22], inputs[3][:, :, [3, 3]]) < 1e-3
    assert error(out, truth[0]) < (1e-3 if dtype == torch.float16 else 1e-5)
    torch.testing.assert_close(lse.double() * math.log(2), truth[5], atol=2e-4, rtol=1e-6)


@pytest.mark.parametrize("heads", [1] if DEVICE == "cpu" else [2, 1])
def test_outputs_with_huge_strides_are_copied(monkeypatch, heads):
    dout, q, k, v, c = make_inputs(70, 70, 16, torch.float32, batch=1)
    inputs = [dout, q, k[:, :heads], v[:, :heads], c]
    expected = run(inputs, None, None, 0.25, 64, 64)
    monkeypatch.setattr(tiles, "FAR", 16)
    assert tiles.make_addressable(inputs[1]).is_contiguous() and not inputs[1].is_contiguous()
    for a, b in zip(run(inputs, None, None, 0.25, 64, 64), expected, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize(("offset", "strength"), [slow(0.0, 3.0), slow(-1.3e5, 1e6), (-1.3e9, 3.0)])
def test_small_differences_of_a_large_sum(offset, strength):
    """c has the size at the end of 128k tokens, with log gates of mean -1 and all at the floor of -1e4."""
    inputs = make_inputs(100, 171, 16, torch.float32, batch=1, strength=strength)
    dout, q, k, v, c = inputs
    grid = (boundary_for(c, 100, 64, 64), None, 0.25, 64, 64)
    expected = attend(inputs, *grid)
    actual = run([dout, q, k, v, c + offset], *grid)
    close = 1e-6 if offset > -1e6 else 1e-4
    for name, a, t in zip(NAMES, actual, expected, strict=False):
        # All gradients are sums over weights; with a single visible key they are tiny.
        scale = t.norm() if name in ("out", "dv") else inputs[0].norm()
        assert ((a - t).norm() / scale).item() < 5 * close, name
    assert (actual[5] - expected[5]).abs().max() < 10 * close


@pytest.mark.parametrize("grid", [(64, 64), (32, 80), (16, 128)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 700), (513, 513), (300, 1111)])
def test_boundary_equals_the_serial_scan(grid, seqlen_q, seqlen_k):
    """Covers ties, where c[first] - c[last] == delta is kept, and NaN, which prunes nothing."""
    c = make_inputs(1, seqlen_k, 16, torch.float32, batch=2, heads=4)[4]
    c[:, 3] = -torch.arange(seqlen_k, dtype=torch.float64, device=DEVICE)
    threshold = torch.tensor([[-0.0, -3.0, -40.0, -65.0], [-1e9, math.nan, -1e-3, -64.99]], device=DEVICE)
    actual = kernels.find_boundary(c, threshold, seqlen_q, *grid)
    assert actual.dtype == torch.int32
    assert torch.equal(actual, find_boundary_serial(c, threshold, seqlen_q, *grid))
    assert (actual.diff(dim=-1) >= 0).all()
    seq_start = torch.tensor([0, seqlen_k // 2], device=DEVICE)
    for delta in (threshold, None):
        assert torch.equal(
            kernels.find_boundary(c, delta, seqlen_q, *grid, seq_start),
            find_boundary(c, delta, seqlen_q, *grid, seq_start),
        )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("seqlen", "head_dim", "dtype"),
    [
        (4096, 64, torch.bfloat16),
        (4097, 64, torch.float16),
        (4096, 128, torch.bfloat16),
        (2049, 256, torch.bfloat16),
        (2048, 64, torch.float32),
        (16384, 64, torch.bfloat16),
        (65536, 64, torch.bfloat16),
    ],
)
def test_long_sequences(seqlen, head_dim, dtype):
    """Local and global heads; the gate gradient is a sum over the whole sequence."""
    inputs = make_inputs(seqlen, seqlen, head_dim, dtype, batch=1)
    grid = find_backend("triton").block_sizes(head_dim, dtype)
    delta = -2.0 * head_dim**0.5 - math.log(seqlen) - 10.0
    boundary = boundary_for(inputs[4], seqlen, *grid, delta=delta)
    assert boundary[:, 0].max() > 0
    check(inputs, boundary, None, head_dim**-0.5, *grid)


@pytest.mark.gpu
@needs_gpu
def test_more_than_two_to_the_31_elements():
    seqlen, stride = 65536, 40960
    buffer = torch.empty(seqlen, stride, dtype=torch.bfloat16, device=DEVICE)
    buffer[:, :256] = torch.randn(seqlen, 256, device=DEVICE)
    views = [buffer[:, 64 * n : 64 * n + 64][None, None] for n in range(4)]
    c = make_inputs(1, seqlen, 64, torch.bfloat16, batch=1, heads=1)[4]
    boundary = boundary_for(c, seqlen, 128, 64)
    actual = run([*views, c], boundary, None, 0.125, 128, 64)
    dense = [x.contiguous() for x in views]
    for a, b in zip(actual, run([*dense, c], boundary, None, 0.125, 128, 64), strict=True):
        assert torch.equal(a, b)
