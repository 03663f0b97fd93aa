"""`forgetting_attention`: blockwise against the reference for outputs and gradients, and error messages."""

import math
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from acp_repro.attention import blockwise, checks, forgetting_attention
from acp_repro.attention.boundary import attention_flops, count_blocks, find_boundary
from acp_repro.attention.checks import AttentionCall
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.attention.op import forgetting_attention_op

from . import budgets
from .budgets import DEVICE, NAMES, judge, right, run


def make_inputs(seqlen_q, seqlen_k, head_dim=32, batch=2, heads=2, dtype=torch.float32, seed=0):
    """Head 0 is local (strong gates), head 1 global."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, heads, head_dim, generator=generator).to(dtype)
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    mean = torch.tensor([1.0, 1e-3]).repeat(heads)[:heads]
    log_fgate = -torch.rand(batch, seqlen_k, heads, generator=generator) * mean
    return [x.requires_grad_() for x in (q, k, v, log_fgate)]


SIZES = [(1, 1), (63, 63), (65, 65), (129, 129), (1000, 1000), (65, 129), (7, 300)]
CASES = [(*size, torch.float32, 16) for size in SIZES]
CASES += [(130, 130, torch.bfloat16, 80), (130, 130, torch.float16, 256)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "dtype", "head_dim"), CASES, ids=str)
@pytest.mark.parametrize(("threshold", "padded"), [(None, False), (-20.0, True), ("auto", False)])
def test_blockwise_matches_the_reference(seqlen_q, seqlen_k, dtype, head_dim, threshold, padded):
    inputs = budgets.make_inputs(seqlen_q, seqlen_k, 2, 2, head_dim, batch=2, dtype=dtype)
    seq_start = torch.tensor([0, min(70, seqlen_k - 1)], device=DEVICE) if padded else None
    options = {"adaptive_threshold": threshold, "seq_start": seq_start}
    found, start = run(inputs, "blockwise", **options)
    _, expected_start = run(inputs, "reference", **options)
    assert torch.equal(start, expected_start)
    judge(found, right(inputs, seqlen_k, start, (64, 64), seq_start=seq_start))


def test_steep_gates_of_one_head_leave_other_heads_bitwise_identical():
    inputs = budgets.make_inputs(256, 256, 2, 2)
    alone, _ = run(inputs, "blockwise")
    inputs[3][:, 1, 64:] *= 1e4  # of one head: c falls by more than 128 within a block
    found, _ = run(inputs, "blockwise")
    assert all(torch.equal(alone[name][:, 0], found[name][:, 0]) for name in NAMES)


def test_pruning_error_stays_within_the_bound_of_appendix_a():
    """The pruned output is within 2 epsilon max|v| of the dense one, and blocks were pruned."""
    q, k, v, log_fgate = make_inputs(1000, 1000, 16)
    q, k = q * 0.3, k * 0.3
    pruned, start = forgetting_attention(
        q, k, v, log_fgate, adaptive_threshold="auto", return_start_index=True
    )
    dense = forgetting_attention(q, k, v, log_fgate, implementation="reference")
    assert start[:, 0].max() > 0
    assert (pruned - dense).abs().max() <= 2 * math.exp(-10) * v.abs().max() + 1e-5


@pytest.mark.parametrize("threshold", [0, torch.zeros(2)])
def test_threshold_0_keeps_blocks_without_decay(threshold):
    """The gates of the global head are 1, so its blocks have a decay of exactly 0, which is not below 0."""
    q, k, v, log_fgate = (x.detach() for x in make_inputs(130, 130))
    log_fgate[..., 1] = 0.0
    _, start = forgetting_attention(q, k, v, log_fgate, adaptive_threshold=threshold, return_start_index=True)
    assert start[0].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_pruned_blocks_are_not_computed():
    """The FLOPs of both passes fall by the pruned ratio; FLOPs are counted, because timings are noisy."""
    q, k, v, log_fgate = (x.detach().transpose(1, 2) for x in make_inputs(1024, 1024, 16))
    c = cumulative_log_fgate(log_fgate)
    flops = []
    for threshold in (torch.full((2, 2), -30.0), None):
        boundary = find_boundary(c, threshold, 1024, 64, 64)
        with FlopCounterMode(display=False) as counter:
            call = AttentionCall(q, k, v, log_fgate, threshold, None, 0.25, "blockwise")
            blockwise.forward(call, c, boundary, 64, 64)
            blockwise.backward(q, call, c, boundary, 64, 64)
        flops.append(counter.get_total_flops())
        count = count_blocks(boundary, 1024, 1024, 64, 64)
        kept = 4 * count.causal - int(count.pruned.sum())
        assert flops[-1] == sum(attention_flops(kept, 64, 64, 16, backward=b) for b in (False, True))
    assert flops[0] < 0.65 * flops[1]


def test_gates_below_the_floor_are_computed_or_rejected():
    """The scores of the first key exceed all others by 3e4, so a log gate of -2e4 does not hide it."""
    q, k, v = torch.randn(3, 1, 70, 1, 16, generator=torch.manual_seed(0), dtype=torch.float64)
    q, k = q.abs(), k / 100
    q[..., 0], k[:, 0, :, 0] = 4.0, 3e4
    log_fgate = torch.zeros(1, 70, 1, dtype=torch.float64)
    log_fgate[:, 30] = -2e4
    out = forgetting_attention(q, k, v, log_fgate, implementation="reference")
    torch.testing.assert_close(out[:, 1:], v[:, :1].expand(1, 69, 1, 16))
    log_fgate[:, 30] = -4e4
    out = forgetting_attention(q, k, v, log_fgate, implementation="reference")
    alone = forgetting_attention(*(x[:, 30:] for x in (q, k, v, 0 * log_fgate)), implementation="reference")
    torch.testing.assert_close(out[:, 30:], alone)
    for implementation in ("blockwise", "triton"):
        inputs = [x.float() for x in (q, k, v, log_fgate)]
        if implementation == "triton":
            pytest.importorskip("triton", reason="pip install triton")
            inputs[3][:, 30] = -math.inf
        with pytest.raises(ValueError, match="log gates below -10000 must be in .0, 9900.0"):
            forgetting_attention(*inputs, implementation=implementation)
        inputs[:2] = torch.ones(2, 1, 70, 1, 16)  # scores of 16 sm_scale, with differences up to twice that
        forgetting_attention(*inputs, implementation=implementation, sm_scale=9890 / 32)
        with pytest.raises(ValueError, match="log gates below"):
            forgetting_attention(*inputs, implementation=implementation, sm_scale=9910 / 32)


def test_operator_passes_opcheck_and_compiles_without_graph_breaks():
    inputs = [x.detach().transpose(1, 2).clone().requires_grad_() for x in make_inputs(65, 65)]
    for options in ((None, None, 0.2, "blockwise", 9), (torch.full((2, 2), -20.0), None, 0.2, "blockwise")):
        torch.library.opcheck(forgetting_attention_op, (*inputs, *options))

    def attend(q, k, v, log_fgate):
        return forgetting_attention(q, k, v, log_fgate, adaptive_threshold="auto", head_first=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), attend(*inputs))
    grads = [torch.autograd.grad(f(*inputs).sum(), inputs) for f in (compiled, attend)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "options",
    [{"adaptive_threshold": -20.0}, {"adaptive_threshold": "auto", "cu_seqlens": torch.tensor([0, 30, 66])}],
    ids=["number", "auto and packed"],
)
def test_one_compiled_graph_handles_every_length(options):
    """More lengths than the eight graphs that PyTorch caches per function."""
    torch.compiler.reset()

    def attend(q, k, v, log_fgate, cu_seqlens=None):
        return forgetting_attention(q, k, v, log_fgate, **{**options, "cu_seqlens": cu_seqlens})

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    starts = options.get("cu_seqlens")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for more in range(10):
            inputs = make_inputs(66 + more, 66 + more, batch=1)
            packing = None if starts is None else starts + more * torch.tensor([0, 1, 1])
            assert torch.equal(compiled(*inputs, packing), attend(*inputs, packing))
    torch.compiler.reset()


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_empty_inputs_return_empty_outputs(implementation):
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (2, 0, 0), (2, 0, 7)):
        q_shape, k_shape = (batch, seqlen_q, 2, 16), (batch, seqlen_k, 2, 16)
        q = torch.randn(q_shape, requires_grad=True)
        k, v = (torch.randn(k_shape, requires_grad=True) for _ in range(2))
        log_fgate = (-torch.rand(k_shape[:3])).requires_grad_()
        out = forgetting_attention(
            q, k, v, log_fgate, adaptive_threshold="auto", implementation=implementation
        )
        assert out.shape == q_shape
        out.sum().backward()
        assert all(not x.grad.any() for x in (q, k, v, log_fgate))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.randn(6, 2, 16)}, ValueError, "q must have 4 dimensions"),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor"),
        ({"q": torch.randn(2, 6, 2, 16).double()}, TypeError, "q must be bfloat16, float16 or float32"),
        ({"k": torch.randn(2, 8, 2, 16).half()}, TypeError, "k must have the dtype of q"),
        ({"k": torch.randn(2, 8, 3, 16), "v": torch.randn(2, 8, 3, 16)}, ValueError, "number of heads"),
        ({"q": torch.randn(2, 9, 2, 16)}, ValueError, "seqlen_q must be at most seqlen_k"),
        (dict.fromkeys("qkv", torch.zeros(2, 8, 2, 257)), ValueError, "head_dim must be from 16 to 256"),
        ({"k": torch.randn(2, 8, 2, 16, device="meta")}, ValueError, "k must be on the device of q"),
        ({"log_fgate": -torch.rand(2, 2, 8)}, ValueError, r"log_fgate must have shape \(2, 8, 2\)"),
        ({"log_fgate": torch.rand(2, 8, 2)}, ValueError, "log_fgate must be in"),
        ({"log_fgate": torch.full((2, 8, 2), torch.nan)}, ValueError, "got nan"),
        ({"adaptive_threshold": 3.0}, ValueError, "adaptive_threshold must be None, a number <= 0"),
        ({"adaptive_threshold": torch.zeros(3)}, ValueError, r"broadcastable to \(2, 2\).*\(3,\)"),
        ({"adaptive_threshold": "always"}, TypeError, "got 'always'"),
        ({"seq_start": torch.tensor([0, 8])}, ValueError, r"seq_start must be in \[0, 7\]"),
        ({"seq_start": torch.tensor([0.0, 1.0])}, TypeError, "seq_start must be an int64"),
        ({"sm_scale": -1.0}, ValueError, "sm_scale must be a positive"),
    ],
)
def test_invalid_arguments_are_rejected(changes, error, message):
    names = ("q", "k", "v", "log_fgate")
    arguments = dict(zip(names, (x.detach() for x in make_inputs(6, 8, 16)), strict=True))
    for implementation in ("auto", "reference") if "float32" not in message else ("auto",):
        with pytest.raises(error, match=message):
            forgetting_attention(**{**arguments, **changes}, implementation=implementation)


def test_inputs_with_heads_first_warn_once():
    x = torch.zeros(1, 4, 40, 16)  # 4 heads, 40 tokens
    checks._warn_of_layout.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forgetting_attention(x, x, x, x[..., 0], head_first=True)
        forgetting_attention(*[x.transpose(1, 2)] * 3, x.transpose(1, 2)[..., 0])
        torch.compile(forgetting_attention, fullgraph=True, backend="eager")(x, x, x, x[..., 0])
    with pytest.warns(UserWarning, match="more heads than time steps; .* pass head_first=True") as found:
        for _ in range(2):
            forgetting_attention(x, x, x, x[..., 0])
    assert len(found) == 1 and found[0].filename == __file__
