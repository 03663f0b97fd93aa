"""Sliding-window forgetting attention against the equations in float64 with an explicit mask.

Random calls draw windows too. Inputs are float32; without a GPU the kernels run in Triton's interpreter.
"""

import math

import pytest
import torch

from acp_repro.attention import (
    PagedKVCache,
    choose_implementation,
    forgetting_attention,
    forgetting_attention_with_kvcache,
    pruning_grid,
)
from acp_repro.attention.boundary import count_blocks, find_boundary
from acp_repro.attention.decay import cumulative_log_fgate

from .budgets import DEVICE, IMPLEMENTATIONS, NAMES, judge, make_inputs, right, run


def each_with(values, fast):
    """Every implementation with every value; the slow interpreter runs only the ``fast`` values."""
    return [
        pytest.param(*one.values, value, marks=[*one.marks, *([pytest.mark.slow] if slow else [])])
        for one in IMPLEMENTATIONS
        for value in values
        for slow in [one.values == ("triton",) and value not in fast]
    ]


@pytest.mark.parametrize("threshold", [None, -20.0])
@pytest.mark.parametrize(("implementation", "length"), each_with((1, 63, 65, 129, 300), fast=(65,)))
def test_row_attends_to_itself_and_preceding_keys_of_the_window(implementation, length, threshold):
    """With a threshold, the boundary is the later of both starts: its kept blocks within the window."""
    inputs = make_inputs(length, length)
    grid = pruning_grid(implementation, 16, torch.float32)
    plain, alone = run(inputs, implementation, adaptive_threshold=threshold)
    for window in (1, 63, 64, 65, 10**12) if length == 129 else (63, 10**12):
        found, start = run(inputs, implementation, adaptive_threshold=threshold, window_size=window)
        judge(found, right(inputs, window, alone, grid))
        first = torch.arange(0, length, grid[0], device=DEVICE)
        assert torch.equal(start, alone.maximum((first - window + 1).clamp(min=0).int() // grid[1]))
    assert all(torch.equal(found[name], plain[name]) for name in NAMES)  # a window over all keys


def empty_cache(seqlen, heads, kv_heads, block=16):
    """An empty cache of one row, and its free blocks."""
    options = {"kv_heads": kv_heads, "block_size": block, "device": DEVICE}
    cache = PagedKVCache.allocate(1, heads, seqlen + block, 16, **options)
    for x in (cache.k, cache.v, cache.c):
        x.fill_(math.nan)
    return cache


def evict(cache, start_block):
    """Evicts the blocks that each head has skipped: others reuse them, and the table is overwritten."""
    group = start_block.shape[1] // cache.block_table.shape[1]
    for h in range(cache.block_table.shape[1]):
        passed = int(start_block[0, h * group : (h + 1) * group].min())
        gone = cache.block_table[0, h, :passed].long()
        for x in (cache.k, cache.v, cache.c):
            x[gone] = math.nan
        cache.block_table[0, h, :passed] = len(cache.k) - 1


@pytest.mark.parametrize(("implementation", "window"), each_with((1, 17, 40, 200), fast=(17,)))
@pytest.mark.parametrize(("threshold", "tokens"), [(None, 1), (-6.0, 3)])
def test_decoding_equals_the_last_row_and_keeps_keys_of_later_queries(
    implementation, threshold, tokens, window
):
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
        # Every write but only few reads, because the interpreter is slow.
        if end not in (3, 18, 60, 81, 120):
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
            boundary = find_boundary(c, delta, tokens, tokens, block, None, window)[..., 0]
            assert torch.equal(start, boundary) and (start >= seen).all()
        judge({"out": out}, right(part, window, start[..., None], (tokens, block)))
        evict(cache, start)
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


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (0, ValueError, "window_size must be at least 1.*got 0"),
        (2.0, TypeError, "integer number of keys.*got 2.0"),
        (True, TypeError, "integer number of keys.*got True"),
        ((64, 0), TypeError, r"\(left, 0\) is left \+ 1\), got \(64, 0\)"),
    ],
)
def test_invalid_windows_are_rejected(window, error, message):
    with pytest.raises(error, match=message):
        run(make_inputs(5, 5), choose_implementation(torch.device(DEVICE)), window_size=window)


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
