"""The public API around the attention: epsilon instead of delta, the pruned ratio, and one-call decoding."""

import math
import re

import pytest
import torch

from acp_repro.attention import (
    PagedKVCache,
    forgetting_attention,
    forgetting_attention_with_kvcache,
    kept_entries,
    logit_bound_from_norms,
    pruned_ratio,
    pruning_grid,
    pruning_threshold,
)

from .budgets import make_inputs, needs_triton, run

LENGTHS = [1, 63, 65, 129]
_BOUND = torch.tensor([0.5, 3.0])
# U as a number, as a tensor of the heads, of (batch, heads), or from the norms of q and k.
_BOUNDS = [1.5, _BOUND, torch.stack((_BOUND, _BOUND + 1)), None]


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_tolerance_and_its_threshold_are_equivalent(implementation, seqlen):
    inputs = make_inputs(seqlen, seqlen, 2, 2, batch=2, device="cpu")
    inputs[3] *= 5
    for bound in _BOUNDS:
        upper = logit_bound_from_norms(*inputs[:2]) if bound is None else bound
        delta = pruning_threshold(upper, seqlen, -4.0)
        found, start = run(inputs, implementation, log_pruning_tolerance=-4.0, logit_bound=bound)
        right, right_start = run(inputs, implementation, adaptive_threshold=delta)
        assert torch.equal(start, right_start)
        assert all(torch.equal(found[name], right[name]) for name in right), bound
    assert seqlen < 129 or start[:, 0].max() > 0  # blocks are pruned


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 129, 200])])
def test_threshold_of_a_tolerance_matches_the_paper(cu_seqlens):
    """The decay of one block is slightly above delta in the first head and slightly below in the second."""
    length = 129 if cu_seqlens is None else 200
    q, k, v, *_ = make_inputs(length, length, 2, 2, device="cpu")
    delta = -2 * _BOUND - math.log(129) - 4.0  # L is the length of the longest document
    gates = (delta / (128 - 63) * torch.tensor([1 - 1e-4, 1 + 1e-4]))[None, :, None].expand(1, 2, length)
    options = {"log_pruning_tolerance": -4.0, "logit_bound": _BOUND, "cu_seqlens": cu_seqlens}
    _, start = forgetting_attention(q, k, v, gates, head_first=True, return_start_index=True, **options)
    assert start[0, :, 2].tolist() == [0, 1]


@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_pruned_ratio_counts_blocks_with_causal_entries(implementation, seqlen_k):
    """Compared with a count over entries: a block is causal or kept if one of its entries is."""
    for seqlen_q in {1, seqlen_k}:
        inputs = make_inputs(seqlen_q, seqlen_k, 2, 2, batch=2, device="cpu")
        _, start = run(inputs, implementation, adaptive_threshold=-5.0)
        grid = pruning_grid("reference", 16, torch.float32)
        causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
        kept = causal & kept_entries(start, seqlen_q, seqlen_k, *grid)

        def count(entries, grid=grid):
            rows = [part.any(-2) for part in entries.split(grid[0], dim=-2)]
            return sum(part.any(-1).long() for row in rows for part in row.split(grid[1], dim=-1))

        right = 1 - count(kept).double() / count(causal)
        q, k = inputs[:2]
        options = {"implementation": implementation}
        found = pruned_ratio(start, q, k, head_first=True, **options)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-15)
        assert torch.equal(pruned_ratio(start, q.transpose(1, 2), k.transpose(1, 2), **options), found)
    assert seqlen_k < 129 or found[:, 0].min() > 0


def test_start_index_of_another_call_is_rejected():
    q, k, *_ = make_inputs(129, 129, 2, 2, batch=2, device="cpu")
    with pytest.raises(ValueError, match=r"start_index must have 3 query blocks.*got shape \(2, 2, 1\)"):
        pruned_ratio(torch.zeros(2, 2, 1, dtype=torch.int32), q, k, head_first=True)


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize(
    "implementation", ["reference", "blockwise", pytest.param("triton", marks=needs_triton)]
)
def test_single_call_appends_and_attends(implementation, seqlen):
    """The first half is a prompt; 1 and then 3 tokens follow. Compared with separate writes and reads."""
    q, k, v, gates, _ = make_inputs(seqlen + 4, seqlen + 4, 4, 2, batch=2, device="cpu")
    gates[0, 1, seqlen] = -math.inf
    cache, copied = (PagedKVCache.allocate(2, 4, seqlen + 4, 16, kv_heads=2, block_size=16) for _ in range(2))
    bound = _BOUND.repeat_interleave(2)
    options = {"head_first": True, "implementation": implementation}
    for cached in (cache, copied):
        cached.seqlens.add_(seqlen)
        cached.write(*(x[:, :, :seqlen] for x in (k, v, gates)))
    for begin, end in ((seqlen, seqlen + 1), (seqlen + 1, seqlen + 4)):
        row, *new = (x[:, :, begin:end] for x in (q, k, v, gates))
        copied.seqlens.add_(end - begin)
        copied.write(*new)
        delta = pruning_threshold(bound, cache.capacity, -4.0)
        expected = forgetting_attention_with_kvcache(row, copied, adaptive_threshold=delta, **options)
        out = forgetting_attention_with_kvcache(
            row,
            cache,
            k=new[0],
            v=new[1],
            log_fgate=new[2],
            log_pruning_tolerance=-4.0,
            logit_bound=bound,
            **options,
        )
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(cache, copied, strict=True))
    assert seqlen < 129 or cache.start_block.max() > 0


TWO_HEADS = torch.zeros(2, 2, 1, 16)
READ = dict.fromkeys(("k", "v", "log_fgate"))  # appends nothing
LARGE = torch.full((2, 2, 1), 10**6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": None}, ValueError, "v must be torch.float32 of shape (2, 2, 1, 16) on cpu like q, got None"),
        ({"k": TWO_HEADS[:, :1]}, ValueError, "k must be torch.float32 of shape (2, 2, 1, 16)"),
        (
            {"log_fgate": torch.zeros(2, 2, 1).double()},
            ValueError,
            "log_fgate must be torch.float32 of shape",
        ),
        ({"log_fgate": torch.full((2, 2, 1), 0.5)}, ValueError, "log_fgate must be in [-inf, 0]"),
        ({"log_pruning_tolerance": -10.0}, TypeError, "logit_bound must be a finite number"),
        ({"adaptive_threshold": -1.0, "log_pruning_tolerance": -1.0}, ValueError, "mutually exclusive"),
        ({**READ, "adaptive_threshold": torch.tensor([-1.0, torch.nan])}, ValueError, "adaptive_threshold"),
        ({**READ, "cache.block_table": LARGE}, ValueError, "block_table must be in [0, 3]"),
        ({**READ, "cache.block_table": -LARGE}, ValueError, "block_table must be in [0, 3]"),
        ({**READ, "cache.seqlens": LARGE[:, 0, 0]}, ValueError, "seqlens must be in [0, 16]"),
        ({"q": torch.zeros(2, 3, 1, 16)}, ValueError, "multiple of the cache's 2 heads"),
        ({"q": torch.zeros(2, 2, 65, 16)}, ValueError, "use forgetting_attention for longer chunks"),
        ({"q": TWO_HEADS.half()}, ValueError, "k must be torch.float16"),
        ({"seq_start": torch.ones(2)}, TypeError, "seq_start must be an int64 tensor"),
        ({"cache.start_block": None}, ValueError, "start_block must be"),
        ({"cache.c": torch.zeros(4, 2, 16)}, ValueError, "c must be torch.float64 of shape"),
        ({"cache.block_table": torch.zeros(2, 2, 1)}, ValueError, "block_table must be torch.int32"),
        ({"cache.seqlens": LARGE[:, 0, 0]}, ValueError, "seqlens must be in [0, 15] to append 1 more tokens"),
        ({"cache.seqlens": LARGE[:1, 0, 0]}, ValueError, "seqlens must be torch.int32 of shape (2,)"),
        ({"cache.seqlens": LARGE[:, 0, 0].to("meta")}, ValueError, "on cpu like q, got"),
        (dict.fromkeys(("cache.k", "cache.v"), torch.zeros(4, 24, 16)), ValueError, "must be a power of two"),
    ],
)
def test_failed_call_appends_nothing(change, error, message):
    q, k, v, gates, _ = make_inputs(1, 1, 2, 2, batch=2, device="cpu")
    cache = PagedKVCache.allocate(2, 2, 16, 16, block_size=16)
    wrong = cache._replace(**{name[6:]: x for name, x in change.items() if name.startswith("cache.")})
    given = {"q": q, "k": k, "v": v, "log_fgate": gates, "head_first": True}
    given |= {name: x for name, x in change.items() if not name.startswith("cache.")}
    with pytest.raises(error, match=re.escape(message)):
        forgetting_attention_with_kvcache(cache=wrong, **given)
    assert not cache.seqlens.any() and not cache.k.any()
