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

from .budgets import DEVICE, NAMES, judge, make_inputs, right, run

SIZES = [(1, 1), (63, 63), (65, 65), (129, 129), (1000, 1000), (65, 129), (7, 300)]
CASES = [(*size, torch.float32, 16) for size in SIZES]
CASES += [(130, 130, torch.bfloat16, 80), (130, 130, torch.float16, 256)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "dtype", "head_dim"), CASES, ids=str)
@pytest.mark.parametrize(("threshold", "padded"), [(None, False), (-20.0, True), ("auto", False)])
def test_blockwise_matches_the_reference(seqlen_q, seqlen_k, dtype, head_dim, threshold, padded):
    inputs = make_inputs(seqlen_q, seqlen_k, 2, 2, head_dim, batch=2, dtype=dtype)
    seq_start = torch.tensor([0, min(70, seqlen_k - 1)], device=DEVICE) if padded else None
    options = {"adaptive_threshold": threshold, "seq_start": seq_start}
    found, start = run(inputs, "blockwise", **options)
    _, expected_start = run(inputs, "reference", **options)
    assert torch.equal(start, expected_start)
    judge(found, right(inputs, seqlen_k, start, (64, 64), seq_start=seq_start))


def test_steep_gates_of_one_head_leave_other_heads_bitwise_identical():
    inputs = make_inputs(256, 256, 2, 2)
    alone, _ = run(inputs, "blockwise")
    inputs[3][:, 1, 64:] *= 1e4  # of one head: c falls by more than 128 within a block
    found, _ = run(inputs, "blockwise")
    assert all(torch.equal(alone[name][:, 0], found[name][:, 0]) for name in NAMES)


def test_pruning_error_stays_within_the_bound_of_appendix_a():
    """The pruned output is within 2 epsilon max|v| of the dense one, and blocks were pruned."""
    q, k, v, log_fgate, _ = make_inputs(1000, 1000, 2, 2, batch=2, device="cpu")
    given = (q * 0.3, k * 0.3, v, log_fgate)
    options = {"adaptive_threshold": "auto", "return_start_index": True}
    pruned, start = forgetting_attention(*given, head_first=True, **options)
    dense = forgetting_attention(*given, head_first=True, implementation="reference")
    assert start[:, 0].max() > 0
    assert (pruned - dense).abs().max() <= 2 * math.exp(-10) * v.abs().max() + 1e-5


def test_pruned_blocks_are_not_computed():
    """The FLOPs of both passes fall by the pruned ratio; FLOPs are counted, because timings are noisy."""
    q, k, v, log_fgate, _ = make_inputs(1024, 1024, 2, 2, batch=2, device="cpu")
    c = cumulative_log_fgate(log_fgate)
    flops = []
    for threshold in (torch.full((2, 2), -15.0), None):
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
    inputs = [x.requires_grad_() for x in make_inputs(65, 65, 2, 2, batch=2, device="cpu")[:4]]
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
        return forgetting_attention(
            q, k, v, log_fgate, head_first=True, **{**options, "cu_seqlens": cu_seqlens}
        )

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    starts = options.get("cu_seqlens")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for more in range(10):
            inputs = make_inputs(66 + more, 66 + more, 2, 2, device="cpu")[:4]
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


PACKED = {"cu_seqlens": torch.tensor([0, 8])}
TWO_ROWS = {**dict.fromkeys("qkv", torch.zeros(2, 2, 8, 16)), "log_fgate": torch.zeros(2, 2, 8)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.randn(6, 2, 16)}, ValueError, "q must have 4 dimensions"),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor"),
        ({"q": torch.randn(2, 2, 8, 16).double()}, TypeError, "q must be bfloat16, float16 or float32"),
        ({"k": torch.randn(2, 2, 8, 16).half()}, TypeError, "k must have the dtype of q"),
        (dict.fromkeys("kv", torch.randn(2, 3, 8, 16)), ValueError, "number of heads"),
        ({"q": torch.randn(2, 2, 9, 16)}, ValueError, "seqlen_q must be at most seqlen_k"),
        (dict.fromkeys("qkv", torch.zeros(2, 2, 8, 257)), ValueError, "head_dim must be from 16 to 256"),
        ({"k": torch.randn(2, 2, 8, 16, device="meta")}, ValueError, "k must be on the device of q"),
        ({"log_fgate": -torch.rand(2, 8, 2)}, ValueError, r"log_fgate must have shape \(2, 2, 8\)"),
        ({"log_fgate": torch.rand(2, 2, 8)}, ValueError, "log_fgate must be in"),
        ({"log_fgate": torch.full((2, 2, 8), torch.nan)}, ValueError, "got nan"),
        ({"adaptive_threshold": 3.0}, ValueError, "adaptive_threshold must be None, a number <= 0"),
        ({"adaptive_threshold": torch.zeros(3)}, ValueError, r"broadcastable to \(2, 2\).*\(3,\)"),
        ({"adaptive_threshold": "always"}, TypeError, "got 'always'"),
        ({"adaptive_threshold": "auto", "log_pruning_tolerance": -9.0}, ValueError, "mutually exclusive"),
        ({"adaptive_threshold": -3.0, "logit_bound": 2.0}, ValueError, "logit_bound needs"),
        ({"log_pruning_tolerance": 1.0}, ValueError, "log_pruning_tolerance is log.epsilon."),
        ({"log_pruning_tolerance": -9.0, "logit_bound": -1.0}, ValueError, "logit_bound must.*got -1.0"),
        ({"log_pruning_tolerance": -9.0, "logit_bound": "auto"}, TypeError, "logit_bound must be .*'auto'"),
        ({"log_pruning_tolerance": -9.0, "logit_bound": torch.ones(3)}, ValueError, r"got shape \(3,\)"),
        ({"seq_start": torch.tensor([0, 8])}, ValueError, r"seq_start must be in \[0, 7\]"),
        ({"seq_start": torch.tensor([0.0, 1.0])}, TypeError, "seq_start must be an int64"),
        ({"sm_scale": -1.0}, ValueError, "sm_scale must be a positive"),
        ({"window_size": 0}, ValueError, "window_size must be at least 1.*got 0"),
        ({"window_size": 2.0}, TypeError, "integer number of keys.*got 2.0"),
        ({"window_size": True}, TypeError, "integer number of keys.*got True"),
        ({"window_size": (64, 0)}, TypeError, r"\(left, 0\) is left \+ 1\), got \(64, 0\)"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, TypeError, "cu_seqlens must be an int32 or int64 tensor"),
        ({"cu_seqlens": torch.tensor([8])}, ValueError, r"shape \(documents \+ 1,\) .* got \(1,\) on"),
        ({"cu_seqlens": torch.tensor([1, 8])}, ValueError, "must start with 0"),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "end with the length 8"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 8])}, ValueError, "be non-decreasing"),
        ({"cu_seqlens": torch.tensor([0, 8], device="meta")}, ValueError, "device of q, .*, got .* on meta"),
        ({**PACKED, "seq_start": torch.tensor([0])}, ValueError, "cannot be used together"),
        ({**PACKED, "q": torch.randn(1, 2, 4, 16)}, ValueError, "as many queries as keys"),
        ({**PACKED, **TWO_ROWS}, ValueError, "a batch of one"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(changes, error, message):
    inputs = make_inputs(8, 8, 2, 2, batch=1 if "cu_seqlens" in changes else 2, device="cpu")
    arguments = dict(zip(("q", "k", "v", "log_fgate"), inputs, strict=False))
    for implementation in ("auto", "reference") if "float32" not in message else ("auto",):
        options = {"head_first": True, "implementation": implementation}
        with pytest.raises(error, match=message) as caught:
            forgetting_attention(**{**arguments, **changes}, **options)
        assert "\n" not in str(caught.value)


def test_inputs_with_heads_first_warn():
    x = torch.zeros(1, 4, 40, 16)  # 4 heads, 40 tokens
    checks._warn_of_layout.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forgetting_attention(x, x, x, x[..., 0], head_first=True)
        forgetting_attention(*[x.transpose(1, 2)] * 3, x.transpose(1, 2)[..., 0])
    with pytest.warns(UserWarning, match="pass head_first=True"):
        forgetting_attention(x, x, x, x[..., 0])
