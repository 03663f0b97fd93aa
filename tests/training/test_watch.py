"""The log survives a kill, and batches come ahead but in order."""

import json
import threading
import time

import pytest
import torch

from acp_repro.attention.boundary import count_blocks, find_boundary_serial
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.model import ForgettingAttentionCore, FoXConfig, FoXForCausalLM
from acp_repro.model.capture import AttentionInputs
from acp_repro.pipeline.papers.acp.task import pruned_ratio_per_layer
from acp_repro.pipeline.training.prefetch import Prefetcher
from acp_repro.pipeline.training.step import eager
from acp_repro.pipeline.training.watch import RunLog

IDS = torch.arange(256).remainder(19)[None]


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = FoXConfig.pro(vocab_size=19, hidden_size=32, num_hidden_layers=3, num_heads=2)
    return FoXForCausalLM(config)


def test_lines_that_will_be_written_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 1}\n{"step": 1, "x": 2}\n{"step": 2, "lo')  # cut by a kill
    with RunLog(tmp_path, 1) as log:
        log.write({"step": 1, "loss_nats": 2.5, "pruned_ratio": [0.5, float("nan")]})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 0, "x": 1}, {"step": 1, "loss_nats": 2.5, "pruned_ratio": [0.5, None]}]


def test_tensorboard_gets_the_same_scalars_or_says_what_to_install(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, *point):
            written.append(point)

        def close(self):
            written.append("closed")

    module = type("module", (), {"SummaryWriter": Writer})
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", module)
    with RunLog(tmp_path, 7, tensorboard=True) as log:
        log.write({"step": 7, "loss_nats": 2.0, "pruned_ratio": [0.25, 0.5]})
    points = [("loss_nats", 2.0, 7), ("pruned_ratio/0", 0.25, 7), ("pruned_ratio/1", 0.5, 7)]
    assert written == [(str(tmp_path / "tensorboard"), 7), *points, "closed"]
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(RuntimeError, match=r"pip install -e '\.\[tensorboard\]'"):
        RunLog(tmp_path, 0, tensorboard=True)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pruned_ratio_of_each_layer_is_the_serial_count(model, compiled):
    with torch.no_grad():
        for layer, bias in enumerate((-3.0, -1.0, 8.0)):  # local, less local, global
            model.model.layers[layer].attn.fgate_proj.bias.fill_(bias)
    expected = []

    def count(_, arguments):
        given = AttentionInputs(*arguments)
        c = cumulative_log_fgate(given.log_fgate)
        boundary = find_boundary_serial(c, given.threshold.expand(c.shape[:2]), 256, 64, 64)
        expected.append(count_blocks(boundary, 256, 256, 64, 64).pruned_ratio.mean().item())

    cores = [m for m in model.modules() if isinstance(m, ForgettingAttentionCore)]
    hooks = [core.register_forward_pre_hook(count) for core in cores]
    model(IDS)
    for hook in hooks:
        hook.remove()
    if compiled:
        for block in model.model.layers:
            block.compile()
    with eager(IDS.device, "float32"), torch.no_grad():
        ratios = pruned_ratio_per_layer(model, IDS)
    assert ratios == expected and ratios[0] > ratios[2] == 0.0
    model.set_log_pruning_tolerance(None)
    assert pruned_ratio_per_layer(model, IDS) == []


def load(index):
    return torch.tensor([index]), torch.tensor([index + 1])


def test_prefetched_batches_are_those_of_a_plain_loop():
    batches = Prefetcher(load, range(3, 20, 2), "cpu", depth=2)
    for index, (ids, labels) in zip(range(3, 20, 2), batches, strict=True):
        assert (ids.item(), labels.item()) == (index, index + 1)
    assert next(batches, None) is None and batches.waited_seconds >= 0


def test_waiting_is_counted_and_at_most_depth_batches_are_held():
    called, go = [], threading.Event()

    def slow(index):
        called.append(index)
        if index == 0:
            go.wait(5)
        return load(index)

    with Prefetcher(slow, range(100), "cpu", depth=2) as batches:
        threading.Timer(0.05, go.set).start()
        next(batches)
        assert batches.waited_seconds > 0.02
        deadline = time.monotonic() + 5
        while len(called) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert called == [0, 1, 2, 3]  # one taken, two ready, one in hand


def test_what_load_raises_surfaces_at_its_place():
    def broken(index):
        return load(index) if index < 2 else load(1 // 0)

    batches = Prefetcher(broken, range(9), "cpu")
    assert [next(batches)[0].item() for _ in range(2)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert next(batches, None) is None
    with pytest.raises(ValueError, match="depth must be at least 1"):
        Prefetcher(load, [], "cpu", depth=0)


def test_closing_early_does_not_hang():
    batches = Prefetcher(load, range(10**9), "cpu", depth=1)
    next(batches)
    batches.close()
    batches.close()
    assert not batches._thread.is_alive() and next(batches, None) is None
