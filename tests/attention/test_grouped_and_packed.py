"""Query heads that share keys and values, and documents packed into one sequence.

Every implementation against the reference in float64: on keys and values repeated by hand, and on one
call for each document. Without a GPU the kernels run in Triton's interpreter.
"""

import math

import pytest
import torch

from acp_repro.attention import _longest_document_gain, forgetting_attention, logit_bound_from_qk_norm
from acp_repro.attention.backends import HAS_TRITON
from acp_repro.attention.boundary import find_boundary
from acp_repro.attention.decay import cumulative_log_fgate, cut_documents, documents_threshold
from acp_repro.attention.op import forgetting_attention_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = [
    "reference",
    pytest.param(
        "blockwise",
        marks=pytest.mark.skipif(DEVICE == "cuda", reason="a CPU path; run make test where no GPU is"),
    ),
    pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="pip install triton")),
]
# For tests of what one fast test with Triton's interpreter has seen already.
TRITON_SLOW = [
    *IMPLEMENTATIONS[:2],
    pytest.param("triton", marks=[*IMPLEMENTATIONS[2].marks, pytest.mark.slow]),
]
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
NAMES = ("out", "dq", "dk", "dv", "dlog_fgate")


def make_inputs(seqlen_q, seqlen_k, heads=4, kv_heads=2, head_dim=16, batch=2, dtype=torch.float32):
    """(q, k, v, log_fgate, dout); even query heads are local, odd ones global."""
    generator = torch.Generator().manual_seed(0)

    def draw(length, count):
        return torch.randn(batch, length, count, head_dim, generator=generator).to(dtype)

    q, k, v, dout = (
        draw(*x) for x in ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads), (seqlen_q, heads))
    )
    mean = torch.where(torch.arange(heads) % 2 == 0, 1.0, 1e-3)
    log_fgate = -torch.rand(batch, seqlen_k, heads, generator=generator) * mean
    return [x.to(DEVICE) for x in (q, k, v, log_fgate, dout)]


def run(inputs, implementation, dtype=None, **options):
    """Output and gradients, in float64."""
    q, k, v, log_fgate, dout = (x.to(dtype or x.dtype) for x in inputs)
    if dtype != torch.float64:
        log_fgate = log_fgate.float()
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_fgate)]
    out = forgetting_attention(*leaves, implementation=implementation, **options)
    return [x.double() for x in (out, *torch.autograd.grad(out, leaves, dout.to(out.dtype)))]


def assert_close(actual, expected, tolerance):
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert a.shape == e.shape and a.isfinite().all(), name
        assert (a - e).norm() <= tolerance * e.norm().clamp(min=1.0), name


def repeated(inputs, **options):
    """The truth for shared heads: float64 on repeated keys and values, gradients summed by hand."""
    q, k, v, log_fgate, dout = inputs
    factor = q.shape[2] // k.shape[2]
    whole = [q, *(x.repeat_interleave(factor, 2) for x in (k, v)), log_fgate, dout]
    out, dq, dk, dv, dgate = run(whole, "reference", torch.float64, **options)
    dk, dv = (x.unflatten(2, (-1, factor)).sum(3) for x in (dk, dv))
    return [out, dq, dk, dv, dgate]


@pytest.mark.parametrize("implementation", TRITON_SLOW)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (6, 2)])
@pytest.mark.parametrize("options", [{}, {"adaptive_threshold": -20.0}, {"adaptive_threshold": "auto"}])
def test_shared_heads_are_repeated_heads(implementation, heads, kv_heads, options):
    inputs = make_inputs(65, 129, heads, kv_heads)
    # The boundary is that of the query heads, whichever head of keys they share.
    grid_of = {"adaptive_threshold": None} if implementation == "triton" else options
    expected = repeated(inputs, **grid_of)
    tolerance = 2e-4 if implementation == "triton" else 2e-6
    assert_close(run(inputs, implementation, **options), expected, tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shared_heads_with_padding_and_layouts(implementation):
    inputs = make_inputs(70, 70, 4, 2)
    options = {"seq_start": torch.tensor([0, 66], device=DEVICE)}  # a whole block is padding
    actual = run(inputs, implementation, **options)
    assert_close(actual, repeated(inputs, **options), 2e-6)
    first = [x.transpose(1, 2) for x in inputs]
    again = run(first, implementation, head_first=True, **options)
    for a, b in zip(actual, again, strict=True):
        assert torch.equal(a, b.transpose(1, 2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 128] if DEVICE == "cuda" else [16])
@pytest.mark.parametrize("lengths", [(300, 300), (70, 300)] if DEVICE == "cuda" else [(40, 50)], ids=str)
@pytest.mark.parametrize("threshold", [pytest.param(None, marks=pytest.mark.slow), "auto"])
def test_padding_may_hold_anything(implementation, head_dim, lengths, threshold):
    """NaN in one row's, infinity in the other's; to the bit as if it were 0: output, gradients, boundary."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    inputs = make_inputs(*lengths, 2, 1, head_dim, dtype=dtype)
    seq_start = torch.tensor([lengths[1] - 30, lengths[1] - 5], device=DEVICE)
    options = {"seq_start": seq_start, "adaptive_threshold": threshold, "implementation": implementation}
    results = []
    for values in ((0.0, 0.0), (math.nan, math.inf)):
        for x, row, value in ((x, row, value) for x in inputs for row, value in enumerate(values)):
            x[row, : seq_start[row] + x.shape[1] - lengths[1]] = value
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:4]]
        out, start = forgetting_attention(*leaves, return_start_index=True, **options)
        results.append([out, start, *torch.autograd.grad(out, leaves, inputs[4])])
    assert all(x.isfinite().all() for x in results[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("implementation", TRITON_SLOW)
def test_shared_heads_in_low_precision(implementation):
    """No worse than eager PyTorch, whose heads' gradients are rounded before their sum."""
    inputs = make_inputs(130, 130, 6, 2, 32, dtype=torch.bfloat16)
    expected = repeated(inputs, adaptive_threshold=-60.0)
    eager = run(inputs, "reference", adaptive_threshold=-60.0)
    actual = run(inputs, implementation, adaptive_threshold=-60.0)
    for name, a, e, g in zip(NAMES, actual, expected, eager, strict=True):
        # As in test_triton: a gate's gradient is one draw of a sum of errors against another, and
        # Triton's interpreter cuts off where a GPU rounds.
        factor = 2.0 if name == "dlog_fgate" else 1.1
        factor *= 2.0 if (implementation, DEVICE) == ("triton", "cpu") else 1.0
        assert (a - e).norm() <= factor * (g - e).norm() + 1e-6 * e.norm(), name


@pytest.mark.parametrize("implementation", TRITON_SLOW[1:])
def test_shared_heads_through_opcheck(implementation):
    inputs = [x.transpose(1, 2).clone() for x in make_inputs(33, 33, 4, 2)[:4]]
    leaves = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(forgetting_attention_op, (*leaves, None, None, 0.25, implementation))


@pytest.mark.parametrize("implementation", TRITON_SLOW[1:])
def test_sums_over_shared_heads_repeat_to_the_bit(implementation):
    inputs = make_inputs(130, 130, 6, 2)
    one, two = (run(inputs, implementation, adaptive_threshold=-20.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_wrong_heads_are_named():
    q, k, v, log_fgate, _ = make_inputs(8, 8, 4, 3)
    with pytest.raises(ValueError, match="q must have a multiple of k's number of heads, 3, got 4"):
        forgetting_attention(q, k, v, log_fgate)
    q, k, v, _, _ = make_inputs(8, 8, 4, 2)
    with pytest.raises(ValueError, match=r"log_fgate must have shape \(2, 8, 4\).*query head"):
        forgetting_attention(q, k, v, torch.zeros(2, 8, 2, device=DEVICE))


def test_bound_from_weights_of_fewer_key_heads():
    q_weight, k_weight = torch.ones(4 * 16), torch.ones(2, 16)
    k_weight[1] = 3.0
    bound = logit_bound_from_qk_norm(q_weight, k_weight.flatten(), 4, 16, num_kv_heads=2)
    assert torch.equal(bound[:2] * 3, bound[2:]) and bound.shape == (4,)
    with pytest.raises(ValueError, match="num_kv_heads must divide"):
        logit_bound_from_qk_norm(q_weight, torch.ones(16), 4, 16, num_kv_heads=3)


LENGTHS = [
    [200],
    [1] * 5,
    [64, 64, 64],
    [1, 127, 63, 9],
    [70, 0, 0, 65, 0],  # empty documents, also at the end
    [0, 3, 190],
]


def packed(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)


@pytest.mark.parametrize("implementation", TRITON_SLOW)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("threshold", [None, -60.0])
def test_packed_documents_are_separate_calls(implementation, lengths, threshold):
    """Also with shared heads. The threshold prunes weights under exp(-50) only."""
    inputs = make_inputs(sum(lengths), sum(lengths), 4, 2, batch=1)
    cu_seqlens = packed(lengths)
    actual = run(inputs, implementation, cu_seqlens=cu_seqlens, adaptive_threshold=threshold)
    parts = [
        run([x[:, begin:end] for x in inputs], "reference", torch.float64)
        for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
        if end > begin
    ]
    expected = [torch.cat(x, 1) for x in zip(*parts, strict=True)]
    starts = cu_seqlens[:-1][cu_seqlens.diff() > 0]
    assert (actual[4][:, starts] == 0).all()
    # Nothing precedes a document's first token, so its gate has no effect there either: its gradient
    # is what rounding leaves of a sum of zeros.
    assert expected[4][:, starts].abs().max() < 1e-12
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_other_documents_hold_leaves_no_trace(implementation):
    """Not a bit of a document changes with the tokens and gradients of the others."""
    lengths = [50, 30, 20]
    inputs = make_inputs(100, 100, 2, 1, batch=1)
    options = {"cu_seqlens": packed(lengths).int(), "adaptive_threshold": None}
    expected = run(inputs, implementation, **options)
    other = [x.clone() for x in inputs]
    inside = slice(50, 80)
    for n, value in ((0, 20.0), (1, 20.0), (2, -7.0), (4, 9.0)):
        keep = other[n][:, inside].clone()
        other[n].fill_(value)
        other[n][:, inside] = keep
    other[3][:, 50] = 0.0  # the gate at a document's first token has no say
    actual = run(other, implementation, **options)
    for name, a, e in zip(NAMES[:4], actual, expected, strict=False):
        assert torch.equal(a[:, inside], e[:, inside]), name
    # A gate's gradient is a running sum from the end, whose later documents cancel to rounding.
    error = (actual[4] - expected[4])[:, inside].norm() / expected[4][:, inside].norm()
    assert error < 1e-4
    # Other gates move the running sum, so the last bits of differences inside may change.
    other[3][:, :50], other[3][:, 80:] = -3.0, -0.5
    for name, a, e in zip(NAMES[:4], run(other, implementation, **options), expected, strict=False):
        assert ((a - e)[:, inside].norm() / e[:, inside].norm()) < 1e-6, name


@pytest.mark.parametrize("threshold", [None, -1e9, -20.0])
def test_blocks_of_other_documents_are_skipped(threshold):
    """Exact attention over 8 documents visits the blocks of a document and no more."""
    inputs = make_inputs(512, 512, 2, 2, batch=1)
    cu_seqlens = torch.arange(0, 513, 64, device=DEVICE)
    options = {"cu_seqlens": cu_seqlens, "return_start_index": True}
    _, start = forgetting_attention(
        *inputs[:4], adaptive_threshold=threshold, implementation="blockwise", **options
    )
    assert torch.equal(start, torch.arange(8, device=DEVICE, dtype=torch.int32).expand(1, 2, 8))


def test_auto_threshold_counts_the_keys_of_the_longest_document():
    gain = _longest_document_gain(torch.tensor([0, 64, 64, 320, 512]), 512).item()
    assert math.log(2) * (1 - 1e-5) < gain <= math.log(2)


def test_many_documents_lose_no_precision():
    """4,096 cuts bring c to -4e7; differences inside a document are still right."""
    log_fgate = -torch.rand(1, 1, 16384) * 1e-3
    cut = cut_documents(log_fgate, torch.arange(0, 16385, 4))
    c = cumulative_log_fgate(cut)
    inside = (c[..., 3::4] - c[..., ::4]).flatten()
    expected = log_fgate.double().view(-1, 4)[:, 1:].sum(1)
    assert (inside - expected).abs().max() < 1e-7
    boundary = find_boundary(c, documents_threshold(None, cut), 16384, 64, 64)
    assert torch.equal(boundary[0, 0], torch.arange(256, dtype=torch.int32))


def test_packed_call_compiles_without_breaks():
    inputs = [x.requires_grad_() for x in make_inputs(100, 100, batch=1)[:4]]

    def attend(*x):
        return forgetting_attention(*x, cu_seqlens=packed([40, 60]), implementation="blockwise")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), attend(*inputs))


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([0, 8], TypeError, "cu_seqlens must be an int32 or int64 tensor"),
        (torch.tensor([0.0, 8.0]), TypeError, "cu_seqlens must be an int32 or int64 tensor"),
        (torch.tensor([8]), ValueError, r"shape \(documents \+ 1,\), got \(1,\)"),
        (torch.tensor([1, 8]), ValueError, "must start with 0"),
        (torch.tensor([0, 9]), ValueError, "end with the length 8"),
        (torch.tensor([0, 5, 4, 8]), ValueError, "never fall"),
        (torch.tensor([0, 8], device="meta"), ValueError, "cu_seqlens must be on the device of q"),
    ],
)
def test_wrong_packing_is_named(cu_seqlens, error, message):
    inputs = [x.cpu() for x in make_inputs(8, 8, batch=1)[:4]]
    with pytest.raises(error, match=message):
        forgetting_attention(*inputs, cu_seqlens=cu_seqlens)


@pytest.mark.skipif(DEVICE == "cuda", reason="values are checked on a CPU; run make test where no GPU is")
def test_scores_that_could_reach_another_document_are_refused():
    inputs = make_inputs(8, 8, batch=1)[:4]
    inputs[0][:], inputs[1][:] = 24.7, 24.7  # norms of 24.7 sqrt(16), so 2 U is 4,881
    forgetting_attention(*inputs, cu_seqlens=torch.tensor([0, 5, 8]))
    inputs[0][:] = 24.9
    with pytest.raises(ValueError, match=r"cu_seqlens must lie in \[0, 4900.0\]"):
        forgetting_attention(*inputs, cu_seqlens=torch.tensor([0, 5, 8]))


def test_packing_excludes_batches_padding_and_a_cache():
    whole = torch.tensor([0, 8])
    inputs = [x.cpu() for x in make_inputs(8, 8)[:4]]
    with pytest.raises(ValueError, match="a batch of one"):
        forgetting_attention(*inputs, cu_seqlens=whole)
    one = [x[:1] for x in inputs]
    with pytest.raises(ValueError, match="as many queries as keys"):
        forgetting_attention(one[0][:, 4:], *one[1:], cu_seqlens=whole)
    with pytest.raises(ValueError, match="cannot be used together"):
        forgetting_attention(*one, cu_seqlens=whole, seq_start=torch.tensor([0]))
