"""Decoding against the equations in float64, with the same blocks kept.

Without a GPU the kernels run in Triton's interpreter. The error budget is eager PyTorch's error in the
same dtype (the reference in that dtype), a half more, and 1e-6; in the interpreter, which cuts off where a
GPU rounds, bfloat16 has twice that. Everything that a call may not read is NaN.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from acp_repro.attention import PagedKVCache, forgetting_attention, forgetting_attention_with_kvcache
from acp_repro.attention.backends import HAS_TRITON
from acp_repro.attention.decoding import decode_op
from acp_repro.attention.reference import decode as decode_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
IMPLEMENTATIONS = [
    "blockwise",
    pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="pip install triton")),
]


def make_problem(
    lengths, tokens, kv_heads, group, head_dim, dtype, block=64, delta=-12.0, seq_start=None, seed=0
):
    """q, a cache whose unread parts are NaN and whose blocks lie in no order, start, threshold, and the
    gates (batch, heads, longest). Even query heads are local, odd ones global."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, longest = len(lengths), kv_heads * group, max(lengths)
    columns = -(-longest // block) + 1
    order = torch.randperm(batch * kv_heads * columns, generator=generator)
    table = order.view(batch, kv_heads, columns).int()
    # Every block of the table, and some that nobody owns.
    k, v = (torch.full((len(order) + 3, block, head_dim), math.nan) for _ in range(2))
    c = torch.full((len(order) + 3, group, block), math.nan, dtype=torch.float64)
    q = torch.randn(batch, heads, tokens, head_dim, generator=generator)
    mean = torch.where(torch.arange(heads) % 2 == 0, 0.3, 1e-4)
    gates = -torch.empty(batch, heads, longest).exponential_(generator=generator) * mean[:, None]
    cache = PagedKVCache(k, v, c, table, torch.zeros(batch, dtype=torch.int32))
    for b, length in enumerate(lengths):
        row = PagedKVCache(k, v, c, table[b : b + 1], torch.tensor([length], dtype=torch.int32))
        keys = torch.randn(2, 1, kv_heads, length, head_dim, generator=generator)
        row.write(keys[0], keys[1], gates[b : b + 1, :, :length])
        cache.seqlens[b] = length
    threshold = torch.full((batch, heads), delta)
    start = torch.zeros(batch, heads, dtype=torch.int32)
    right = start.clone()
    cache.advance(right, threshold, tokens, seq_start)
    for b in range(batch):
        for h in range(kv_heads):
            first = int(right[b, h * group : (h + 1) * group].min())
            # c of skipped blocks says that they are skipped; their keys say nothing.
            skipped = table[b, h, :first].long()
            k[skipped] = v[skipped] = math.nan
            if seq_start is not None:
                padding = torch.arange(columns * block) < seq_start[b]
                pages = table[b, h].long()
                for x in (k, v):
                    x[pages] = x[pages].masked_fill(padding.view(columns, block, 1), math.nan)
    moved = [x.to(DEVICE) for x in (k.to(dtype), v.to(dtype), c, table, cache.seqlens)]
    rest = [x.to(DEVICE) for x in (q.to(dtype), start, threshold, right)]
    return rest[0], PagedKVCache(*moved), *rest[1:]


def wide(cache):
    return cache._replace(k=cache.k.double(), v=cache.v.double())


def relative(x, right):
    x, right = x.double(), right.double()
    assert x.isfinite().all()
    return ((x - right).norm() / right.norm().clamp(min=1e-30)).item()


CASES = [
    # lengths, tokens, kv_heads, group, head_dim, dtype, block
    ([1], 1, 1, 1, 16, torch.float32, 16),
    ([64, 65, 1], 1, 2, 1, 64, torch.float32, 64),
    ([333, 129, 63], 1, 2, 1, 64, torch.bfloat16, 64),
    ([1000], 1, 2, 1, 48, torch.float16, 64),
    ([200, 131], 5, 2, 1, 32, torch.float32, 32),
    ([150, 66], 1, 2, 3, 20, torch.float32, 32),
    ([129, 97], 8, 1, 2, 64, torch.bfloat16, 32),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_is_the_equation_over_the_kept_blocks(case, padded, implementation, poisoned):
    lengths, tokens, kv_heads, group, head_dim, dtype, block = case
    seq_start = torch.tensor([min(37, n - 1) for n in lengths]) if padded else None
    q, cache, start, threshold, right = make_problem(*case, seq_start=seq_start)
    seq_start = None if seq_start is None else seq_start.to(DEVICE)
    scale = 1.3 / math.sqrt(head_dim)
    truth = decode_reference(q.double(), wide(cache), right, seq_start, scale)
    eager = decode_reference(q, cache, right, seq_start, scale)
    out = forgetting_attention_with_kvcache(
        q,
        cache,
        start,
        head_first=True,
        seq_start=seq_start,
        sm_scale=scale,
        adaptive_threshold=threshold,
        implementation=implementation,
    )
    assert torch.equal(start, right)
    if max(lengths) > 300:
        assert start.max() > 0
    loose = 2.0 if DEVICE == "cpu" and dtype == torch.bfloat16 else 1.0
    assert out.dtype == dtype and out.shape == q.shape
    assert relative(out, truth) <= loose * 1.5 * relative(eager, truth) + 1e-6
    if seq_start is not None:
        position = cache.positions(tokens)
        assert (out.transpose(1, 2)[position < seq_start[:, None]] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_exact_and_head_last(implementation):
    q, cache, start, _, _ = make_problem([77, 130], 2, 2, 1, 32, torch.float32)
    cache.k.nan_to_num_(0.5), cache.v.nan_to_num_(0.5)
    start.zero_()
    truth = decode_reference(q.double(), wide(cache), start, None, 32**-0.5)
    out = forgetting_attention_with_kvcache(q.transpose(1, 2), cache, start, implementation=implementation)
    assert (start == 0).all()
    assert relative(out.transpose(1, 2), truth) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_boundary_moves_on_with_the_stream(implementation):
    """Token by token the boundary is what a search from the beginning finds, and never falls."""
    length, block = 300, 16
    q, cache, start, threshold, _ = make_problem([length], 1, 2, 1, 16, torch.float32, block, delta=-6.0)
    cache.k.nan_to_num_(0.5), cache.v.nan_to_num_(0.5)
    start.zero_()
    for n in range(250, length + 1, 1 if DEVICE == "cuda" else 7):
        cache.seqlens.fill_(n)
        before, fresh = start.clone(), torch.zeros_like(start)
        forgetting_attention_with_kvcache(
            q, cache, start, head_first=True, adaptive_threshold=threshold, implementation=implementation
        )
        cache.advance(fresh, threshold, 1)
        assert torch.equal(start, fresh) and (start >= before).all()
    assert start[0, 0] > 10 and start[0, 1] == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "strange", [*(pytest.param(x, marks=pytest.mark.slow) for x in (1e9, -1e9, math.nan)), "mixed"]
)
def test_the_table_may_hold_any_number_where_there_is_only_padding(strange, implementation):
    """Wherever the search begins, as it does in programs that come after another has stored its end."""
    lengths, seq_start, block = [900, 300], torch.tensor([130, 95]), 16
    given = make_problem(lengths, 1, 2, 1, 16, torch.float32, block, delta=-3.0, seq_start=seq_start)
    q, cache, start, threshold, right = given
    seq_start, padding = seq_start.to(DEVICE), seq_start // block
    assert (right[:, 0].cpu() > padding).all() and (right[:, 1].cpu() == padding).all()
    nobodys = len(cache.k) - 3  # `make_problem` leaves three blocks to nobody
    for n, c in enumerate((1e9, -1e9, math.nan) if strange == "mixed" else (strange,) * 3):
        cache.c[nobodys + n] = c
    for b, blocks in enumerate(padding.tolist()):
        cache.block_table[b, :, :blocks] = nobodys + torch.arange(blocks, dtype=torch.int32) % 3
    for first in (0, 2, 5, right):
        start.zero_().add_(first)
        out = forgetting_attention_with_kvcache(
            q,
            cache,
            start,
            head_first=True,
            seq_start=seq_start,
            adaptive_threshold=threshold,
            implementation=implementation,
        )
        assert torch.equal(start, right) and out.isfinite().all()


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_that_hold_fewer_tokens_than_queries(implementation, tokens):
    """Idle rows and new ones: queries without a token give 0, nothing is written for them, the start is never
    before the first block, and the row is right when it goes on. The idle row's table names the busy row's
    blocks."""
    block, heads, most = 16, 2, 60
    lengths = torch.tensor([0, 1, tokens - 1, 50], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, most, 16, generator=generator).to(DEVICE) for _ in range(3))
    gates = -torch.rand(4, heads, most, generator=generator).to(DEVICE) * 5
    memory = torch.full(
        (8 + 4 * heads * 4,), 10**6, dtype=torch.int32, device=DEVICE
    )  # before the first page
    table = memory[8:].view(4, heads, 4)
    table.copy_(torch.randperm(table.numel(), generator=generator).view_as(table))
    own = table[0].clone()
    table[0] = table[3]
    pool = [torch.full((table.numel(), block, 16), math.nan, device=DEVICE) for _ in "kv"]
    c = torch.full((table.numel(), 1, block), math.nan, dtype=torch.float64, device=DEVICE)
    cache = PagedKVCache(*pool, c, table, lengths.to(DEVICE))
    busy = PagedKVCache(*pool, c, table[3:].clone(), cache.seqlens[3:] - tokens)
    busy.write(*(x[3:, :, : 50 - tokens] for x in (k, v, gates)))
    start = torch.zeros(4, heads, dtype=torch.int32, device=DEVICE)

    def newest(x):
        """(4, H, T, ...), the newest tokens of each row, NaN before its first."""
        x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 3) + (tokens, 0), value=math.nan)
        return torch.stack([row[:, n : n + tokens] for row, n in zip(x, cache.seqlens.tolist(), strict=True)])

    for step in range(3):
        if implementation == "triton":
            from acp_repro.attention import triton as kernels

            kernels.write_kvcache(cache, *map(newest, (k, v, gates)))
        else:
            cache.write(*map(newest, (k, v, gates)))
        options = {"head_first": True, "adaptive_threshold": -40.0, "implementation": implementation}
        out = forgetting_attention_with_kvcache(newest(q), cache, start, **options)
        assert start.min() == 0 and (step == 0 or start[3].max() > 0)
        for b, n in enumerate(cache.seqlens.tolist()):
            held = min(n, tokens)
            assert (out[b, :, : tokens - held] == 0).all()
            if held:
                row = [x[b : b + 1, :, :n].double() for x in (q, k, v, gates)]
                row[0] = row[0][:, :, n - held :]
                truth = forgetting_attention(*row, head_first=True, implementation="reference")
                assert relative(out[b, :, tokens - held :], truth[0]) < 1e-5
        table[0] = own
        cache.seqlens.add_(torch.tensor([1, tokens, tokens, tokens], device=DEVICE))

    empty = cache._replace(block_table=table[:0], seqlens=cache.seqlens[:0])
    empty.write(*(x[:0, :, :tokens] for x in (k, v, gates)))
    assert forgetting_attention_with_kvcache(q[:0, :, :tokens], empty, start[:0], **options).shape[0] == 0


@pytest.mark.skipif(DEVICE == "cuda", reason="values are checked on a CPU; run make test where no GPU is")
def test_values_that_attention_refuses_are_refused_while_decoding():
    q, cache, start, _, _ = make_problem([70], 1, 2, 1, 16, torch.float32, 16)
    for delta in (torch.tensor(5.0), torch.tensor([-1.0, math.nan])):
        with pytest.raises(ValueError, match="adaptive_threshold"):
            forgetting_attention_with_kvcache(q, cache, start, head_first=True, adaptive_threshold=delta)
    for gate in (0.5, math.nan):
        with pytest.raises(ValueError, match="log_fgate"):
            cache.write(*torch.zeros(2, 1, 2, 1, 16), torch.full((1, 2, 1), gate))
    for name, value in (("block_table", -1), ("block_table", 10**6), ("seqlens", -1), ("seqlens", 10**6)):
        wrong = cache._replace(**{name: torch.full_like(getattr(cache, name), value)})
        with pytest.raises(ValueError, match=name):
            forgetting_attention_with_kvcache(q, wrong, start, head_first=True)
    with pytest.raises(ValueError, match="sm_scale"):
        forgetting_attention_with_kvcache(q, cache, start, head_first=True, sm_scale=math.nan)


def views(x):
    """The same numbers with others in between, and where they are all the same, in the place of one."""
    yield torch.stack((x, torch.full_like(x, 1)), 1)[:, 0]
    if (x == x[0]).all():
        yield torch.cat((x[:1], torch.full_like(x, 1)))[:1].expand_as(x)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lengths", [[130, 77, 100], [99, 99, 99]])
def test_strides_of_lengths_and_starts_are_read_as_they_are(lengths, implementation):
    seq_start = torch.tensor([20, 40, 10]) if lengths[0] > lengths[1] else torch.tensor([33, 33, 33])
    given = make_problem(lengths, 1, 1, 2, 16, torch.float32, 16, delta=-3.0, seq_start=seq_start)
    q, cache, start, threshold, right = given
    seq_start = seq_start.to(DEVICE)
    truth = decode_reference(q, cache, right, seq_start, 0.25)
    for seqlens, first in zip(views(cache.seqlens), views(seq_start), strict=True):
        start.zero_()
        out = forgetting_attention_with_kvcache(
            q,
            cache._replace(seqlens=seqlens),
            start,
            head_first=True,
            seq_start=first,
            adaptive_threshold=threshold,
            implementation=implementation,
        )
        assert torch.equal(start, right)
        torch.testing.assert_close(out, truth)


def test_writing_is_the_same_on_both_sides():
    kernels = pytest.importorskip("acp_repro.attention.triton", reason="pip install triton")
    _, cache, *_ = make_problem([70, 31], 1, 2, 2, 24, torch.float32, 32)
    generator = torch.Generator().manual_seed(3)
    cache = cache._replace(seqlens=next(views(cache.seqlens)))
    for tokens in (1, 3, 8, 40):
        cache.seqlens.add_(tokens)
        k, v = (
            torch.randn(2, tokens, 2, 24, generator=generator).to(DEVICE).transpose(1, 2) for _ in range(2)
        )
        gates = -torch.rand(2, tokens, 4, generator=generator).to(DEVICE).transpose(1, 2) * 4
        gates[0, 1, 0] = -math.inf
        twin = PagedKVCache(*(x.clone() for x in cache))._replace(seqlens=cache.seqlens)
        cache.write(k, v, gates)
        if tokens <= 8:
            kernels.write_kvcache(twin, k, v, gates)
        else:  # a prefill, which knows its sums
            before = cache.c_at(cache.seqlens.long()[:, None] - tokens - 1)
            kernels.write_blocks(twin, k, v, before + gates.double().clamp(min=-1e4).cumsum(-1))
        for a, b in zip(cache, twin, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_a_sign_that_pytorch_only_noted_is_read():
    """Numbers of the other sign, which PyTorch turns when it reads them: of what is written, and of q and
    delta."""
    kernels = pytest.importorskip("acp_repro.attention.triton", reason="pip install triton")
    q, cache, *_ = make_problem([70], 1, 1, 1, 16, torch.float32, 16)
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(1, 1, 1, 16, generator=generator).to(DEVICE) for _ in range(2))
    gates = -torch.rand(1, 1, 1, generator=generator).to(DEVICE) * 4
    delta = torch.full((1, 1), -5.0, device=DEVICE)
    cache.seqlens.add_(1)
    results = []
    for turn in (lambda x: x, lambda x: torch._neg_view(-x)):
        twin = PagedKVCache(*(x.clone() for x in cache))
        kernels.write_kvcache(twin, turn(k), turn(v), turn(gates))
        start = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
        out = forgetting_attention_with_kvcache(
            turn(q), twin, start, head_first=True, adaptive_threshold=turn(delta), implementation="triton"
        )
        results.append([x.nan_to_num(7.0) for x in (*twin, start, out)])
    assert results[0][-2] > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_decay_stays_exact_over_a_million_tokens():
    """Strong gates: c passes -5e6, where float32 steps by 0.5. Decays over the last 500 tokens, against
    sums of the gates themselves."""
    torch.manual_seed(0)
    tokens, block, chunk = 2**20, 64, 2**12
    table = torch.arange(tokens // block, dtype=torch.int32)[None, None]
    empty = torch.zeros(tokens // block, block, 0)
    c = torch.full((tokens // block, 1, block), math.nan, dtype=torch.float64)
    cache = PagedKVCache(empty, empty, c, table, torch.zeros(1, dtype=torch.int32))
    nothing = torch.zeros(1, 1, chunk, 0)
    for _ in range(tokens // chunk):
        gates = -torch.empty(1, 1, chunk).exponential_() * 5
        cache.seqlens.add_(chunk)
        cache.write(nothing, nothing, gates)
    found = c.flatten()[-1] - c.flatten()[-500:-1]
    right = [math.fsum(gates[0, 0, -n:].double().tolist()) for n in range(499, 0, -1)]
    assert c.flatten()[-1] < -5e6
    assert (found - torch.tensor(right, dtype=torch.float64)).abs().max() < 1e-6


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("head_first", [True, False])
def test_a_compiled_step_is_the_step(implementation, head_first, backend):
    """As one graph: what is written, what moves on, and the answers."""
    torch.compiler.reset()
    q, cache, start, threshold, _ = make_problem([333, 129, 63], 1, 2, 1, 64, torch.float32)
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 3, 2, 1, 64, generator=generator).to(DEVICE)
    gates = -torch.rand(3, 2, 1, generator=generator).to(DEVICE)
    q = q if head_first else q.transpose(1, 2)

    def step(cache, start):
        cache.seqlens.add_(1)
        cache.write(k, v, gates)
        return forgetting_attention_with_kvcache(
            q,
            cache,
            start,
            head_first=head_first,
            adaptive_threshold=threshold,
            implementation=implementation,
        )

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend=backend)):
        own, start_own = PagedKVCache(*(x.clone() for x in cache)), start.clone()
        outs = [call(own, start_own) for _ in range(3)]
        results.append([*outs, start_own, *(x.nan_to_num(7.0) for x in own)])
    assert results[0][3].max() > 0
    for name, a, b in zip(("out 1", "out 2", "out 3", "start", *cache._fields), *results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_the_operator_is_registered_soundly(implementation):
    q, cache, start, threshold, _ = make_problem([70], 2, 2, 1, 16, torch.float32, 16)
    # What nothing reads is NaN, which is equal to nothing.
    cache = PagedKVCache(*(x.nan_to_num(7.0) for x in cache))
    for first, second in ((1, 2), (1, 3)):  # time before heads, and heads last of all
        rows = q.transpose(first, second).contiguous().transpose(first, second)
        arguments = (rows, *cache, start.clone(), threshold, None, 0.25, implementation)
        torch.library.opcheck(decode_op, arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": (5, 24, 16)}, ValueError, "block_size must be a power of two"),
        ({"c": (5, 2, 16)}, ValueError, "c must be float64"),
        ({"table": torch.int64}, ValueError, "block_table must be int32"),
        ({"q": (1, 3, 1, 16)}, ValueError, "multiple of the cache's 2 heads"),
        ({"q": (1, 2, 65, 16)}, ValueError, "use forgetting_attention for longer chunks"),
        ({"q": (1, 2, 1, 32)}, ValueError, "k and v must have shape"),
        ({"dtype": torch.float16}, TypeError, "must have the dtype of q"),
        ({"seqlens": torch.ones(2, dtype=torch.int32)}, ValueError, "seqlens must be int32 of shape .1,."),
        ({"seq_start": torch.ones(1)}, TypeError, "seq_start must be an int64 tensor"),
        ({"seq_start": [0]}, TypeError, "seq_start must be an int64 tensor"),
        ({"seq_start": torch.zeros(1, 1, dtype=torch.int64)}, ValueError, "seq_start must have shape .1,."),
        ({"seq_start": torch.zeros(1, dtype=int, device="meta")}, ValueError, "seq_start must be on the dev"),
        ({"seqlens": torch.ones(1, dtype=torch.int32, device="meta")}, ValueError, "seqlens must be on the"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    shape = change.get("k", (5, 16, 16))
    k = torch.zeros(shape)
    c = torch.zeros(change.get("c", (shape[0], 1, shape[1])), dtype=torch.float64)
    table = torch.zeros(1, 2, 2, dtype=change.get("table", torch.int32))
    seqlens = change.get("seqlens", torch.ones(1, dtype=torch.int32))
    cache = PagedKVCache(k, k, c, table, seqlens)
    q = torch.zeros(change.get("q", (1, 2, 1, 16)), dtype=change.get("dtype", torch.float32))
    start = torch.zeros(q.shape[:2], dtype=torch.int32)
    with pytest.raises(error, match=message):
        forgetting_attention_with_kvcache(q, cache, start, head_first=True, seq_start=change.get("seq_start"))


@pytest.mark.skipif(
    sys.platform != "linux" or not HAS_TRITON, reason="run on Linux, which Triton's compiler is for"
)
@pytest.mark.slow
def test_the_kernels_compile_for_hopper_without_spills():
    """The interpreter takes what the compiler refuses, so the compiler is asked too."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, str(script), "--decode"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 5 * (2 + 2 + 4) and all("0 bytes spill stores" in line for line in lines), (
        done.stdout
    )
