"""Sliding-window forgetting attention against the equations in float64 with an explicit mask.

Random calls draw windows too. Inputs are float32; without a GPU the kernels run in Triton's interpreter.
"""

import math

import pytest
import torch

from acp_repro.attention import PagedKVCache, forgetting_attention, forgetting_attention_with_kvcache
from acp_repro.attention.boundary import count_blocks, find_boundary
from acp_repro.attention.decay import cumulative_log_fgate

from .budgets import DEVICE, IMPLEMENTATIONS, NAMES, judge, make_inputs, right, run


def evict(cache):
    """Evicts the blocks that each head has skipped: others reuse them, and the table is overwritten."""
    group = cache.start_block.shape[1] // cache.block_table.shape[1]
    for h in range(cache.block_table.shape[1]):
        passed = int(cache.start_block[0, h * group : (h + 1) * group].min())
        gone = cache.block_table[0, h, :passed].long()
        for x in (cache.k, cache.v, cache.c):
            x[gone] = math.nan
        cache.block_table[0, h, :passed] = len(cache.k) - 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("window", "threshold", "tokens"), [(17, None, 1), (40, -6.0, 3), (1, -6.0, 3), (200, -6.0, 3)]
)
def test_decoding_equals_the_last_row_and_keeps_keys_of_later_queries(
    implementation, threshold, tokens, window
):
    seqlen, heads, block = 120, 4, 16
    inputs = make_inputs(seqlen, seqlen, heads, 2)
    cache = PagedKVCache.allocate(1, heads, seqlen + block, 16, kv_heads=2, block_size=block, device=DEVICE)
    for x in (cache.k, cache.v, cache.c):
        x.fill_(math.nan)
    options = {"head_first": True, "adaptive_threshold": threshold, "window_size": window}
    delta = None if threshold is None else torch.full((1, heads), threshold, device=DEVICE)
    for begin in range(0, seqlen, tokens):
        end = begin + tokens
        cache.seqlens.fill_(end)
        cache.write(*(x[:, :, begin:end] for x in inputs[1:4]))
        # Every write but only few reads, because the interpreter is slow.
        if end not in (18, 60, 81, 120):
            continue
        part = [inputs[0][:, :, begin:end], *(x[:, :, :end] for x in inputs[1:4]), inputs[4][:, :, begin:end]]
        out = forgetting_attention_with_kvcache(part[0], cache, implementation=implementation, **options)
        c = cumulative_log_fgate(part[3])
        start = find_boundary(c, delta, tokens, tokens, block, None, window)
        assert torch.equal(cache.start_block, start[..., 0])
        judge({"out": out}, right(part, window, start, (tokens, block)))
        evict(cache)
    assert window == 200 or start.min() > 0


def test_blocks_before_the_window_count_as_pruned():
    c = cumulative_log_fgate(make_inputs(1000, 1000)[3])
    pruned = [
        count_blocks(find_boundary(c, threshold, 1000, 64, 64, None, window), 1000, 1000, 64, 64)
        for threshold in (None, torch.full((1, 2), -20.0, device=DEVICE))
        for window in (None, 200)
    ]
    assert all(count.causal == pruned[0].causal for count in pruned)
    nothing, window, gates, both = (count.pruned[0].tolist() for count in pruned)
    # A query block sees its own key block and the four with the 199 keys before its first query.
    assert nothing == [0, 0] and window == [sum(max(0, n - 4) for n in range(16))] * 2
    assert both == [gates[0], window[1]] and gates[0] > window[0] and gates[1] < window[1]


@pytest.mark.gpu
def test_cached_launches_and_compiled_code_apply_the_window():
    """A replayed pass (from the third call on) must not use the launches of another window."""
    inputs = make_inputs(1000, 1000, 4, 2, 64, dtype=torch.bfloat16)
    first = {window: run(inputs, "triton", window_size=window)[0] for window in (300, 301)}
    assert not any(torch.equal(first[300][name], first[301][name]) for name in NAMES)
    for _ in range(4):
        for window, found in first.items():
            again = run(inputs, "triton", window_size=window)[0]
            assert all(torch.equal(again[name], found[name]) for name in NAMES)
    options = {"head_first": True, "implementation": "triton", "window_size": 300}
    attend = torch.compile(
        lambda *x: forgetting_attention(*x, **options), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(attend(*inputs[:4]), first[300]["out"])
