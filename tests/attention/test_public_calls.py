"""The public API around the attention: epsilon instead of delta, the pruned ratio, and one-call decoding."""

from __future__ import annotations

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

from .budgets import needs_triton

LENGTHS = [1, 63, 65, 129]
BATCH, HEADS, HEAD_DIM = 2, 2, 16
_BOUND = torch.tensor([0.5, 3.0])
# U as a number, as a tensor of the heads, of (batch, heads), or from the norms of q and k.
_BOUNDS = [1.5, _BOUND, torch.stack((_BOUND, _BOUND + 1)), None]


def make_inputs(seqlen_q: int, seqlen_k: int, batch: int = BATCH):
    """q, k, v and log gates, heads first; the first head is local."""
    generator = torch.Generator().manual_seed(seqlen_k)
    q = torch.randn(batch, HEADS, seqlen_q, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, batch, HEADS, seqlen_k, HEAD_DIM, generator=generator)
    gates = -torch.rand(batch, HEADS, seqlen_k, generator=generator) * torch.tensor([[3.0], [1e-3]])
    return [x.requires_grad_() for x in (q, k, v, gates)]


def run(inputs, **options):
    """The output, the start index and the four gradients."""
    out, start = forgetting_attention(*inputs, head_first=True, return_start_index=True, **options)
    return out, start, *torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_tolerance_and_its_threshold_are_equivalent(implementation, seqlen):
    inputs = make_inputs(seqlen, seqlen)
    for bound in _BOUNDS:
        upper = logit_bound_from_norms(*inputs[:2]) if bound is None else bound
        delta = pruning_threshold(upper, seqlen, -4.0)
        options = {"log_pruning_tolerance": -4.0, "logit_bound": bound, "implementation": implementation}
        found = run(inputs, **options)
        right = run(inputs, adaptive_threshold=delta, implementation=implementation)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True)), bound
    assert seqlen < 129 or found[1][:, 0].max() > 0  # blocks are pruned
    time_first = [x.transpose(1, 2) for x in inputs]
    out = forgetting_attention(*time_first, **options)
    assert torch.equal(out.transpose(1, 2), found[0])


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 129, 200])])
def test_threshold_of_a_tolerance_matches_the_paper(cu_seqlens):
    """The decay of one block is slightly above delta in the first head and slightly below in the second."""
    length = 129 if cu_seqlens is None else 200
    q, k, v, _ = make_inputs(length, length, batch=1)
    delta = -2 * _BOUND - math.log(129) - 4.0  # L is the length of the longest document
    gates = (delta / (128 - 63) * torch.tensor([1 - 1e-4, 1 + 1e-4]))[None, :, None].expand(1, 2, length)
    options = {"log_pruning_tolerance": -4.0, "logit_bound": _BOUND, "cu_seqlens": cu_seqlens}
    _, start = forgetting_attention(q, k, v, gates, head_first=True, return_start_index=True, **options)
    assert start[0, :, 2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"adaptive_threshold": -3.0, "log_pruning_tolerance": -10.0}, ValueError, "mutually exclusive"),
        ({"adaptive_threshold": "auto", "log_pruning_tolerance": -10.0}, ValueError, "mutually exclusive"),
        ({"adaptive_threshold": -3.0, "logit_bound": 2.0}, ValueError, "logit_bound needs"),
        ({"log_pruning_tolerance": 1.0}, ValueError, "log_pruning_tolerance is log.epsilon."),
        ({"log_pruning_tolerance": -9.0, "logit_bound": -1.0}, ValueError, "logit_bound must.*got -1.0"),
        ({"log_pruning_tolerance": -9.0, "logit_bound": "auto"}, TypeError, "logit_bound must be .*'auto'"),
        ({"log_pruning_tolerance": -9.0, "logit_bound": torch.ones(3)}, ValueError, r"got shape \(3,\)"),
    ],
)
def test_invalid_tolerances_are_rejected(options, error, message):
    with pytest.raises(error, match=message) as caught:
        forgetting_attention(*make_inputs(5, 5), head_first=True, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_pruned_ratio_counts_blocks_with_causal_entries(implementation, seqlen_k):
    """Compared with a count over entries: a block is causal or kept if one of its entries is."""
    for seqlen_q in {1, seqlen_k}:
        inputs = make_inputs(seqlen_q, seqlen_k)
        with torch.no_grad():
            _, start = forgetting_attention(
                *inputs,
                head_first=True,
                adaptive_threshold=-5.0,
                return_start_index=True,
                implementation=implementation,
            )
        block_q, block_k = pruning_grid("reference", HEAD_DIM, torch.float32)
        causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
        kept = causal & kept_entries(start, seqlen_q, seqlen_k, block_q, block_k)

        def count(entries, grid=(block_q, block_k)):
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
    q, k, *_ = make_inputs(129, 129)
    with pytest.raises(ValueError, match=r"start_index must have 3 query blocks.*got shape \(2, 2, 1\)"):
        pruned_ratio(torch.zeros(2, 2, 1, dtype=torch.int32), q, k, head_first=True)


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize(
    "implementation", ["reference", "blockwise", pytest.param("triton", marks=needs_triton)]
)
def test_single_call_appends_and_attends(implementation, seqlen):
    """The first half is a prompt; 1 and then 3 tokens follow. Compared with separate writes and reads."""
    group, block, tolerance = 2, 16, -4.0
    inputs = [x.detach() for x in make_inputs(seqlen + 4, seqlen + 4)]
    k, v = inputs[1:3]
    q, gates = (x.repeat_interleave(group, 1) for x in (inputs[0], inputs[3]))
    heads = HEADS * group
    cache, copied = (
        PagedKVCache.allocate(BATCH, heads, seqlen + 4, HEAD_DIM, kv_heads=HEADS, block_size=block)
        for _ in range(2)
    )
    start = torch.zeros_like(copied.start_block)
    delta = pruning_threshold(_BOUND.repeat_interleave(group), cache.capacity, tolerance)
    for begin, end in ((0, seqlen), (seqlen, seqlen + 1), (seqlen + 1, seqlen + 4)):
        new = [x[:, :, begin:end] for x in (k, v, gates)]
        copied.seqlens.add_(end - begin)
        copied.write(*new)
        if begin == 0:
            cache.seqlens.add_(end)
            cache.write(*new)
            continue
        row = q[:, :, begin:end]
        options = {"implementation": implementation}
        expected = forgetting_attention_with_kvcache(
            row, copied, start, head_first=True, adaptive_threshold=delta, **options
        )
        out = forgetting_attention_with_kvcache(
            *(row.transpose(1, 2), cache),
            **dict(zip(("k", "v", "log_fgate"), (x.transpose(1, 2) for x in new), strict=True)),
            log_pruning_tolerance=tolerance,
            logit_bound=_BOUND.repeat_interleave(group),
            **options,
        )
        assert torch.equal(out.transpose(1, 2), expected)
        assert torch.equal(cache.start_block, start)
        assert all(torch.equal(a, b) for a, b in zip(cache[:5], copied[:5], strict=True))
    assert seqlen < 129 or start.max() > 0


def test_failed_call_appends_nothing():
    q, k, v, gates = (x.detach() for x in make_inputs(1, 1))
    cache = PagedKVCache.allocate(BATCH, HEADS, 16, HEAD_DIM, block_size=16)
    right = {"k": k, "v": v, "log_fgate": gates}
    for change, error, message in (
        ({"v": None}, ValueError, "v must be torch.float32 of shape (2, 2, 1, 16) on cpu like q, got None"),
        ({"k": k[:, :1]}, ValueError, "k must be torch.float32 of shape (2, 2, 1, 16)"),
        ({"log_fgate": gates.double()}, ValueError, "log_fgate must be torch.float32 of shape (2, 2, 1)"),
        ({"log_fgate": gates + 9}, ValueError, "log_fgate must be in [-inf, 0]"),
        ({"log_pruning_tolerance": -10.0}, TypeError, "logit_bound must be a finite number"),
        ({"adaptive_threshold": -1.0, "log_pruning_tolerance": -1.0}, ValueError, "mutually exclusive"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            forgetting_attention_with_kvcache(q, cache, head_first=True, **{**right, **change})
    with pytest.raises(ValueError, match="start_block must be .* got None"):
        forgetting_attention_with_kvcache(q, cache._replace(start_block=None), head_first=True, **right)
    assert not cache.seqlens.any() and not cache.k.any()
    cache.seqlens.fill_(16)
    with pytest.raises(ValueError, match="cache.seqlens must be in .0, 15. to append 1 more tokens"):
        forgetting_attention_with_kvcache(q, cache, head_first=True, **right)
