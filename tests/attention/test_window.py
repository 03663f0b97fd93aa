"""A sliding window in forgetting attention, against a dense softmax in float64 with the mask written out.

Without a GPU the kernels run in Triton's interpreter; where one is, `make test-gpu` runs the last three tests
and `make test` the others, which compile many kernels. Inputs are float32. A weight is then right to the
rounding of its score, of the row's sum and of some products, and each result's budget is what that makes of
the sum of its terms' absolute values: a gradient that is 0, as with a window of 1, is not read as an error.
"""

import importlib
import math

import pytest
import torch

from acp_repro.attention import (
    PagedKVCache,
    choose_implementation,
    forgetting_attention,
    forgetting_attention_with_kvcache,
    pruning_grid,
    why,
)
from acp_repro.attention.backends import HAS_TRITON
from acp_repro.attention.boundary import count_blocks, find_boundary, window_end, window_start
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.attention.op import forgetting_attention_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="pip install triton")
IMPLEMENTATIONS = [
    pytest.param("reference"),
    pytest.param(
        "blockwise",
        marks=pytest.mark.skipif(DEVICE == "cuda", reason="a CPU path; run make test where no GPU is"),
    ),
    pytest.param("triton", marks=needs_triton),
]
_ROUNDINGS = 8  # of a product, in units of its last bit
NAMES = ("out", "dq", "dk", "dv", "dlog_fgate")


def make_inputs(seqlen_q, seqlen_k, heads=2, kv_heads=1, head_dim=16, batch=1, dtype=torch.float32):
    """(q, k, v, log_fgate, dout), head first; even heads are local, odd ones global."""
    generator = torch.Generator().manual_seed(seqlen_q)

    def draw(heads, length):
        return torch.randn(batch, heads, length, head_dim, generator=generator).to(dtype)

    mean = torch.where(torch.arange(heads) % 2 == 0, 0.3, 1e-3)[:, None]
    log_fgate = -torch.rand(batch, heads, seqlen_k, generator=generator) * 2 * mean
    rows = [draw(heads, seqlen_q), *(draw(kv_heads, seqlen_k) for _ in "kv")]
    return [x.to(DEVICE) for x in (*rows, log_fgate, draw(heads, seqlen_q))]


def dense(inputs, window, start_index=None, grid=None, documents=None, seq_start=None):
    """Output and gradients in float64, and the budget of each; row i sees keys i - window + 1 to i, of its
    blocks and its document."""
    q, k, v, log_fgate, dout = (x.double() for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_fgate)]
    q, k, v, log_fgate = leaves
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    keys = torch.arange(k.shape[2], device=q.device)
    rows = keys[k.shape[2] - q.shape[2] :, None]
    kept = ((keys <= rows) & (rows - keys < window))[None, None]
    if start_index is not None:
        blocks = torch.arange(q.shape[2], device=q.device) // grid[0]
        kept = kept & (keys // grid[1] >= start_index[:, :, blocks, None])
    if documents is not None:
        number = torch.bucketize(keys, documents, right=True)
        kept = kept & (number == number[rows])
    if seq_start is not None:
        kept = kept & (keys >= seq_start[:, None, None, None])
    c = log_fgate.cumsum(-1)
    decay, scale = c[:, :, rows] - c[:, :, None, :], q.shape[-1] ** -0.5
    scores = q @ k.mT * scale + decay
    empty = ~kept.any(-1, keepdim=True)
    weights = scores.masked_fill(~kept & ~empty, -math.inf).softmax(-1).masked_fill(empty, 0.0)
    out = weights @ v
    results = [out, *torch.autograd.grad(out, leaves, dout)]
    with torch.no_grad():
        q, k, v, dout = (x.abs() for x in (q, k, v, dout))
        size = q @ k.mT * scale + decay.abs()
        wrong = weights * (size + (weights * size).sum(-1, keepdim=True) + _ROUNDINGS) * 2**-24
        dscores = dout @ v.mT
        dscores = wrong * (dscores + (weights * dscores).sum(-1, keepdim=True))
        dc = dscores.sum(-2)
        dc[:, :, rows[:, 0]] += dscores.sum(-1)
        shares = (dscores.mT @ q * scale, wrong.mT @ dout)
        dk, dv = (x.unflatten(1, (inputs[1].shape[1], -1)).sum(2) for x in shares)
        budgets = [wrong @ v, dscores @ k * scale, dk, dv, dc.flip(-1).cumsum(-1).flip(-1)]
    return results, budgets


def run(inputs, implementation, **options):
    """Output and gradients, and the start index."""
    leaves = [x.detach().requires_grad_() for x in inputs[:4]]
    out, start = forgetting_attention(
        *leaves, head_first=True, implementation=implementation, return_start_index=True, **options
    )
    return [out, *torch.autograd.grad(out, leaves, inputs[4])], start


def assert_close(actual, expected):
    for name, a, e, budget in zip(NAMES[: len(actual)], actual, *expected, strict=True):
        assert a.shape == e.shape and a.isfinite().all(), name
        assert (a.double() - e).norm() <= budget.norm(), (name, (a.double() - e).norm() / budget.norm())


def windows(length):
    return sorted({1, 2, 63, 64, 65, length, length + 7})


def each_with(values, fast):
    """Every implementation with every value; the interpreter, which takes seconds for each, is slow but for
    ``fast``."""
    return [
        pytest.param(*one.values, value, marks=[*one.marks, *([pytest.mark.slow] if slow else [])])
        for one in IMPLEMENTATIONS
        for value in values
        for slow in [one.values == ("triton",) and value not in fast]
    ]


@pytest.mark.parametrize("threshold", [None, -20.0])
@pytest.mark.parametrize(("implementation", "length"), each_with((1, 63, 65, 129, 1000), fast=(1, 65)))
def test_a_row_sees_itself_and_the_keys_before_it(implementation, length, threshold):
    """With a threshold the later of the two starts a row: kept are the threshold's blocks, in the window."""
    inputs = make_inputs(length, length)
    grid = pruning_grid(implementation, 16, torch.float32)
    alone = run(inputs, implementation, adaptive_threshold=threshold)[1]
    for window in windows(length):
        actual, start = run(inputs, implementation, adaptive_threshold=threshold, window_size=window)
        assert_close(actual, dense(inputs, window, alone, grid))
        first = torch.arange(0, length, grid[0], device=DEVICE)
        assert torch.equal(start, alone.maximum((first - window + 1).clamp(min=0).int() // grid[1]))


@pytest.mark.parametrize(("implementation", "window"), each_with((1, 30, 64, 150), fast=(30,)))
def test_fewer_queries_than_keys_and_padding(implementation, window):
    inputs = make_inputs(130, 200, heads=4, kv_heads=2, batch=2)
    seq_start = torch.tensor([0, 141], device=DEVICE)
    actual, start = run(inputs, implementation, window_size=window, seq_start=seq_start)
    assert_close(actual, dense(inputs, window, seq_start=seq_start))
    assert (start[0] == (torch.arange(0, 130, 64, device=DEVICE) + 71 - window).clamp(min=0) // 64).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("threshold", [pytest.param(None, marks=pytest.mark.slow), "auto"])
def test_packed_documents(implementation, threshold):
    inputs = make_inputs(200, 200)
    documents = torch.tensor([0, 1, 70, 70, 135, 200], device=DEVICE)
    options = {"cu_seqlens": documents, "adaptive_threshold": threshold}
    grid = pruning_grid(implementation, 16, torch.float32)
    alone = run(inputs, implementation, **options)[1]
    for window in (33, 66):
        actual, _ = run(inputs, implementation, **options, window_size=window)
        expected = dense(inputs, window, alone, grid, documents=documents)
        expected[0][4][..., documents[:-1]] = 0.0  # the gate at a document's first token
        assert_close(actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_that_holds_every_key_is_none(implementation):
    inputs = make_inputs(129, 129)
    plain, start = run(inputs, implementation, adaptive_threshold=-20.0)
    for window in (129, 130, 10**12):
        wide, same = run(inputs, implementation, adaptive_threshold=-20.0, window_size=window)
        assert torch.equal(start, same)
        assert all(torch.equal(a, b) for a, b in zip(plain, wide, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_scores_outside_the_window_may_be_any_size(implementation):
    """Keys before the window with scores so high that their weights would be infinite."""
    inputs = make_inputs(129, 129)
    inputs[0].fill_(30.0)
    inputs[1][:, :, :20] = 10.0
    assert_close(run(inputs, implementation, window_size=40)[0], dense(inputs, 40))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_operator_and_vmap(implementation):
    inputs = [x.clone().requires_grad_() for x in make_inputs(33, 33)[:4]]
    torch.library.opcheck(forgetting_attention_op, (*inputs, None, None, 0.25, implementation, 9))
    options = {"head_first": True, "implementation": implementation, "window_size": 9}
    many = [torch.stack([x.detach(), x.detach() * 0.5]) for x in inputs]
    mapped = torch.vmap(lambda *x: forgetting_attention(*x, **options))(*many)
    for n in range(2):
        torch.testing.assert_close(mapped[n], forgetting_attention(*(x[n] for x in many), **options))


def empty_cache(seqlen, heads, kv_heads, block=16, head_dim=16):
    """A cache of one row, and a block that nobody owns."""
    columns = -(-seqlen // block)
    k, v = (torch.full((kv_heads * columns + 1, block, head_dim), math.nan) for _ in "kv")
    c = torch.full((len(k), heads // kv_heads, block), math.nan, dtype=torch.float64)
    table = torch.arange(len(k) - 1, dtype=torch.int32).view(1, kv_heads, columns)
    return PagedKVCache(*(x.to(DEVICE) for x in (k, v, c, table, torch.zeros(1, dtype=torch.int32))))


def evict(cache, start_block):
    """Gives back what each head has passed: its blocks are another's now, and its table says nothing."""
    group = start_block.shape[1] // cache.block_table.shape[1]
    for h in range(cache.block_table.shape[1]):
        passed = int(start_block[0, h * group : (h + 1) * group].min())
        gone = cache.block_table[0, h, :passed].long()
        for x in (cache.k, cache.v, cache.c):
            x[gone] = math.nan
        cache.block_table[0, h, :passed] = len(cache.k) - 1


@pytest.mark.parametrize(("implementation", "window"), each_with((1, 16, 17, 40, 200), fast=(17, 40)))
@pytest.mark.parametrize(("threshold", "tokens"), [(None, 1), (None, 3), (-6.0, 1), (-6.0, 3)])
def test_decoding_is_the_last_row_and_keeps_what_later_queries_see(implementation, threshold, tokens, window):
    seqlen, heads, block = 120, 4, 16
    inputs = make_inputs(seqlen, seqlen, heads, 2)
    cache = empty_cache(seqlen, heads, 2)
    start = torch.zeros(1, heads, dtype=torch.int32, device=DEVICE)
    options = {"head_first": True, "adaptive_threshold": threshold, "window_size": window}
    delta = torch.full((1, heads), threshold or 0.0, device=DEVICE)
    for begin in range(0, seqlen, tokens):
        end = begin + tokens
        cache.seqlens.fill_(end)
        cache.write(*(x[:, :, begin:end] for x in inputs[1:4]))
        # Every step of writing and few of reading: the interpreter is slow.
        if end not in (3, 15, 18, 48, 60, 66, 81, 120):
            continue
        part = [inputs[0][:, :, begin:end], *(x[:, :, :end] for x in inputs[1:4]), inputs[4][:, :, begin:end]]
        out = forgetting_attention_with_kvcache(
            part[0], cache, start, implementation=implementation, **options
        )
        seen = max(0, begin - window + 1) // block
        if threshold is None:
            assert (start == seen).all()
        else:
            c = cumulative_log_fgate(part[3])
            right = find_boundary(c, delta, tokens, tokens, block, None, window)[..., 0]
            assert torch.equal(start, right) and (start >= seen).all()
        expected = dense(part, window, start[..., None], (tokens, block))
        assert_close([out], [x[:1] for x in expected])
        evict(cache, start)
    assert window == 200 or start.min() > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_after_padding(implementation):
    inputs = make_inputs(3, 120, 4, 2)
    cache = empty_cache(120, 4, 2)
    cache.seqlens.fill_(120)
    cache.write(*inputs[1:4])
    for first in (10, 90, 118):
        seq_start = torch.tensor([first], device=DEVICE)
        start = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
        out = forgetting_attention_with_kvcache(
            inputs[0],
            cache,
            start,
            head_first=True,
            seq_start=seq_start,
            window_size=50,
            implementation=implementation,
        )
        assert_close([out], [x[:1] for x in dense(inputs, 50, seq_start=seq_start)])
        assert (start == max(first, 117 - 49) // 16).all()


def test_the_edges_of_a_window_are_each_others_inverse():
    for window in (1, 5):
        keys = torch.arange(20)
        sees = (keys >= window_start(keys[:, None], window)) & (keys <= keys[:, None])
        assert sees.sum(-1).tolist() == [min(i + 1, window) for i in range(20)]
        seen_by = (keys[:, None] <= window_end(keys, window)) & (keys <= keys[:, None])
        assert torch.equal(sees, seen_by)


def test_blocks_before_the_window_count_as_pruned():
    log_fgate = make_inputs(1000, 1000)[3]
    c = cumulative_log_fgate(log_fgate)
    pruned = [
        count_blocks(find_boundary(c, threshold, 1000, 64, 64, None, window), 1000, 1000, 64, 64)
        for threshold in (None, torch.full((1, 2), -20.0, device=DEVICE))
        for window in (None, 200)
    ]
    assert all(count.causal == pruned[0].causal for count in pruned)
    nothing, window, gates, both = (count.pruned[0].tolist() for count in pruned)
    # A row of blocks sees its own and the four that the 199 keys before its first query lie in.
    assert nothing == [0, 0] and window == [sum(max(0, n - 4) for n in range(16))] * 2
    assert both == [gates[0], window[1]] and gates[0] > window[0] and gates[1] < window[1]


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (0, ValueError, "window_size must be at least 1.*got 0"),
        (-1, ValueError, "None for no window, got -1"),
        (2.0, TypeError, "whole number of keys.*got 2.0"),
        (True, TypeError, "whole number of keys.*got True"),
        ((64, 0), TypeError, r"\(left, 0\) is left \+ 1\), got \(64, 0\)"),
    ],
)
def test_what_is_no_window_is_refused(window, error, message):
    with pytest.raises(error, match=message):
        run(make_inputs(5, 5), choose_implementation(torch.device(DEVICE)), window_size=window)
    cache, start = empty_cache(5, 2, 1), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(error, match=message):
        forgetting_attention_with_kvcache(
            make_inputs(1, 5)[0], cache, start, head_first=True, window_size=window
        )


@needs_triton
def test_why_names_the_window(monkeypatch):
    backward = importlib.import_module("acp_repro.attention.triton.backward")
    monkeypatch.delenv("ACP_REPRO_PORTABLE", raising=False)
    q = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16)
    grid = (128, 64)
    reason = backward.why_portable(q, q, q, *grid, window_size=9)
    assert reason == "the kernels for Hopper have no window, and window_size is 9"
    assert backward.faster_launch(q, q, q, q, *grid, 9) is None
    if DEVICE == "cuda":
        q = q.cuda()
        assert why(q, q, q, window_size=9) == reason
        assert why(q, q, q, window_size=128) == why(q, q, q)


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [None, -20.0])
def test_low_precision_is_no_worse_than_eager(threshold):
    """Tiles that the window's edge crosses, that lie inside it and that the diagonal crosses. Eager PyTorch
    prunes on another grid; its error is that of rounding all the same."""
    length, window = 1000, 300
    inputs = make_inputs(length, length, 4, 2, 64, dtype=torch.bfloat16)
    grid = pruning_grid("triton", 64, torch.bfloat16)
    delta = None if threshold is None else torch.full((1, 4), threshold, device=DEVICE)
    alone = find_boundary(cumulative_log_fgate(inputs[3]), delta, length, *grid)
    truth = [dense(inputs, window, start, grid)[0] for start in (alone, None)]
    actual = run(inputs, "triton", adaptive_threshold=threshold, window_size=window)[0]
    eager = run(inputs, "reference", window_size=window)[0]
    for name, a, t, e, exact in zip(NAMES, actual, truth[0], eager, truth[1], strict=True):
        factor = 2.0 if name == "dlog_fgate" else 1.2  # a sum of errors of random signs
        assert (a - t).norm() <= factor * (e - exact).norm() + 1e-6 * t.norm(), name


@pytest.mark.gpu
def test_repeated_passes_and_compiled_code_know_the_window():
    """A pass that is repeated (from its third call on) must not take another window's launches."""
    inputs = make_inputs(1000, 1000, 4, 2, 64, dtype=torch.bfloat16)
    first = {window: run(inputs, "triton", window_size=window)[0] for window in (300, 301)}
    assert not any(torch.equal(a, b) for a, b in zip(*first.values(), strict=True))
    for _ in range(4):
        for window, right in first.items():
            again = run(inputs, "triton", window_size=window)[0]
            assert all(torch.equal(a, b) for a, b in zip(again, right, strict=True))
    options = {"head_first": True, "implementation": "triton", "window_size": 300}
    attend = torch.compile(
        lambda *x: forgetting_attention(*x, **options), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(attend(*inputs[:4]), first[300][0])


@pytest.mark.gpu
def test_decoding_on_a_gpu():
    test_decoding_is_the_last_row_and_keeps_what_later_queries_see("triton", -6.0, 3, 40)
