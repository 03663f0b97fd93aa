"""The timer: a balanced order, so that a method against itself has ratio 1; and peak memory."""

import itertools
from collections import Counter
from statistics import median

import pytest
import torch

from acp_repro.pipeline.benchmark.timing import interleaved, orders, peak_memory

CPU = torch.device("cpu")


SLOWED = {
    "first of a turn": lambda index: 1 + 0.04 * (index % 2 == 0),
    "second of a turn": lambda index: 1 + 0.04 * (index % 2 == 1),
    "later and later": lambda index: 1 + 0.04 * index,
}


@pytest.mark.parametrize("slowed", SLOWED)
@pytest.mark.parametrize("repeats", [1, 3, 9, 10])
def test_method_against_itself_has_ratio_1_despite_a_slow_slot(slowed, repeats):
    """With a fixed order in all rounds, the ratio would be 1.04 or 1 / 1.04."""
    index = itertools.count()
    calls = {"one": lambda: None, "other": lambda: None}
    times = interleaved(calls, CPU, repeats, lambda *_: SLOWED[slowed](next(index)))
    assert median(times["one"]) == pytest.approx(median(times["other"]), abs=1e-12)
    assert len(times["one"]) == len(times["other"]) == repeats + repeats % 2


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_measurement_order_balances_positions_and_predecessors(count):
    turns = list(orders(range(count), 2 * count))
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    assert set(Counter((place, name) for turn in turns for place, name in enumerate(turn)).values()) == {2}
    before = Counter(pair for turn in turns for pair in itertools.pairwise(turn))
    assert len(before) == count * (count - 1) and set(before.values()) == {2}


def test_warm_ups_are_excluded_and_failures_propagate():
    made = []
    times = interleaved({"one": lambda: made.append(1)}, CPU, 2, warm_ups=3)
    assert len(made) == 5 and len(times["one"]) == 2
    with pytest.raises(ZeroDivisionError):
        interleaved({"one": lambda: 1 / 0}, CPU, 2)


def test_peak_memory_on_a_cpu():
    def work(first):
        one = torch.zeros(first)  # float32
        del one
        two = torch.zeros(25_000)
        return two + 1  # two live tensors

    assert peak_memory(lambda: work(100_000), CPU) == pytest.approx(400_000, rel=0.01)
    assert peak_memory(lambda: work(10), CPU) == pytest.approx(200_000, rel=0.01)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    device = torch.device("cuda")
    there = torch.zeros(10**6, device=device)
    assert peak_memory(lambda: torch.zeros(10**6, device=device) + 1, device) == pytest.approx(8e6, rel=0.01)
    del there
