"""Decoding tests that complement :mod:`.fuzz_decoding_on_gpu`; without a GPU, in Triton's interpreter."""

import math

import pytest
import torch

from acp_repro.attention import PagedKVCache, forgetting_attention, forgetting_attention_with_kvcache
from acp_repro.attention.backends import HAS_TRITON
from acp_repro.attention.decoding import decode_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
IMPLEMENTATIONS = [
    "blockwise",
    pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="pip install triton")),
]


def make_cache(lengths, tokens=1, group=1, head_dim=16, block=16):
    """q, a cache of two key heads with shuffled blocks and NaN in unwritten entries, and its start.

    Query heads alternate between local and global; the group of the second key head begins with a global one.
    """
    generator = torch.Generator().manual_seed(0)
    batch, heads, columns = len(lengths), 2 * group, -(-max(lengths) // block) + 1
    order = torch.randperm(batch * 2 * columns, generator=generator)
    k, v = (torch.full((len(order), block, head_dim), math.nan) for _ in range(2))
    c = torch.full((len(order), group, block), math.nan, dtype=torch.float64)
    table, seqlens = order.view(batch, 2, columns).int(), torch.tensor(lengths, dtype=torch.int32)
    start = torch.zeros(batch, heads, dtype=torch.int32)
    cache = PagedKVCache(k, v, c, table, seqlens, start)
    order = torch.arange(heads) + torch.arange(heads) // max(2, group)
    mean = torch.where(order % 2 == 0, 0.3, 1e-4)
    gates = -torch.empty(batch, heads, max(lengths)).exponential_(generator=generator) * mean[:, None]
    cache.write(*torch.randn(2, batch, 2, max(lengths), head_dim, generator=generator), gates)
    q = torch.randn(batch, heads, tokens, head_dim, generator=generator).to(DEVICE)
    return q, PagedKVCache(*(x.to(DEVICE) for x in cache)), start.to(DEVICE, copy=True)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_with_fewer_tokens_than_queries(implementation, tokens):
    """Idle and new rows: queries without a token return 0 and write nothing, the start is never before the
    first block, and the row is correct when it resumes. The idle row's table has the busy row's blocks."""
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
                assert (out[b, :, tokens - held :] - truth[0]).norm() < 1e-5 * truth.norm()
        table[0] = own
        cache.seqlens.add_(torch.tensor([1, tokens, tokens, tokens], device=DEVICE))


def test_prefill_written_by_the_kernel_equals_the_slow_write():
    """With given sums; 49 tokens span three blocks of the second row."""
    kernels = pytest.importorskip("acp_repro.attention.triton", reason="pip install triton")
    _, cache, _ = make_cache([70, 45], 1, 2, 24, 32)
    cache.seqlens.add_(49)
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 2, 49, 2, 24, generator=generator).to(DEVICE).transpose(2, 3)
    gates = -torch.rand(2, 49, 4, generator=generator).to(DEVICE).transpose(1, 2) * 4
    gates[0, 1, 0] = -math.inf
    copied = PagedKVCache(*(x.clone() for x in cache))
    before = cache.c_at(cache.seqlens.long()[:, None] - 50)
    cache.write(k, v, gates)
    kernels.write_kvcache(copied, k, v, gates, before + gates.double().clamp(min=-1e4).cumsum(-1))
    for a, b in zip(cache, copied, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_decay_stays_exact_over_a_million_tokens():
    """Strong gates: c is below -5e6, where float32 has a spacing of 0.5. Decays over the last 500 tokens are
    compared with direct sums of the gates."""
    torch.manual_seed(0)
    tokens, block, chunk = 2**20, 64, 2**15
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
@pytest.mark.parametrize(("implementation", "head_first"), [("auto", True), ("reference", False)])
def test_compiled_step_equals_the_eager_step(implementation, head_first, backend):
    """In one graph: the cache writes, the advanced start and the outputs."""
    torch.compiler.reset()
    q, cache, start = make_cache([333, 129, 63])
    threshold = torch.full(start.shape, -12.0, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 3, 2, 1, 16, generator=generator).to(DEVICE)
    gates = -torch.rand(3, 2, 1, generator=generator).to(DEVICE)
    new = {"k": k, "v": v, "log_fgate": gates}
    if not head_first:
        q = q.transpose(1, 2)
        new = {name: x.transpose(1, 2) for name, x in new.items()}
    options = {"adaptive_threshold": threshold, "implementation": implementation, "head_first": head_first}

    def step(cache, start):
        return forgetting_attention_with_kvcache(q, cache, start, **new, **options)

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend=backend)):
        own, start_own = PagedKVCache(*(x.clone() for x in cache)), start.clone()
        outs = [call(own, start_own) for _ in range(3)]
        results.append([*outs, start_own, *(x.nan_to_num(7.0) for x in own)])
    assert results[0][3].max() > 0
    for name, a, b in zip(("out 1", "out 2", "out 3", "start", *cache._fields), *results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "implementation",
    ["blockwise", pytest.param("triton", marks=[*IMPLEMENTATIONS[1].marks, pytest.mark.slow])],
)
def test_operator_passes_opcheck(implementation):
    q, cache, start = make_cache([70], 2)
    threshold = torch.full(start.shape, -12.0, device=DEVICE)
    # Unread entries are NaN, which compares unequal to itself.
    cache = PagedKVCache(*(x.nan_to_num(7.0) for x in cache))
    for first, second in ((1, 2), (1, 3)):  # time before heads, and heads as the last dimension
        rows = q.transpose(first, second).contiguous().transpose(first, second)
        arguments = (rows, *cache[:5], start.clone(), threshold, None, 0.25, implementation)
        torch.library.opcheck(decode_op, arguments)
