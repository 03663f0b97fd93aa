"""Time, throughput, memory and FLOPs of inference, against the same encoder without gates."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import torch
from torch import nn

from acp_repro.retention import RetentionConfig, encoder_cost, token_budgets
from acp_repro.training.step import autocast

from ..trained import TrainedRetention


@torch.no_grad()
def measure(trained: TrainedRetention) -> list[dict[str, Any]]:
    """One record a length: full batches of random tokens, the median of some repeats.

    ``scorer_ms`` is the time inside the gates' scoring. Memory is the peak of the pass, weights aside, and
    missing on a CPU. FLOPs are those of ``encoder_cost``, of one example.
    """
    model, settings, run = trained.model.eval(), trained.measure, trained.run
    longest = run.dataset.max_tokens
    lengths = sorted({min(length, longest) for length in settings.speed_lengths_tokens})
    return [_at(trained, model, length) for length in lengths]


def _at(trained: TrainedRetention, model: nn.Module, length: int) -> dict[str, Any]:
    rows, repeats = trained.measure.speed_batch_examples, trained.measure.timing_repeats
    generator = torch.Generator().manual_seed(0)
    low = len(trained.texts.tokenizer.all_special_ids)
    ids = torch.randint(low, len(trained.texts.tokenizer), (rows, length), generator=generator)
    ids = ids.to(trained.device)
    gates = getattr(model, "retention", None)
    config = gates.config if gates is not None else RetentionConfig(1.0, method="dense")

    def run() -> None:
        with autocast(trained.device, trained.run.training.dtype):
            model(input_ids=ids)

    def dense() -> None:
        with gates.off() if gates is not None else contextlib.nullcontext():
            run()

    # In turns, so that what slows the machine for a while slows both.
    ours, plain, scoring = [], [], []
    for repeat in range(-1, repeats):
        seconds = (
            _timed(trained.device, run),
            _timed(trained.device, dense),
            _scoring(trained.device, gates, run),
        )
        if repeat >= 0:  # the first warms up
            for found, value in zip((ours, plain, scoring), seconds, strict=True):
                found.append(value)
    batch, dense_batch = statistics.median(ours), statistics.median(plain)
    memory, dense_memory = _peak(trained.device, run), _peak(trained.device, dense)
    return {
        "length_tokens": length,
        "batch_examples": rows,
        "repeats": repeats,
        "batch_ms": 1e3 * batch,
        "dense_batch_ms": 1e3 * dense_batch,
        "scorer_ms": 1e3 * statistics.median(scoring),
        "throughput_tokens_per_s": rows * length / batch,
        "dense_throughput_tokens_per_s": rows * length / dense_batch,
        "peak_memory_bytes": memory,
        "dense_peak_memory_bytes": dense_memory,
        "example_flop": _flop(trained, config, length),
        "dense_example_flop": _flop(trained, RetentionConfig(1.0, method="dense"), length),
    }


def _timed(device: torch.device, run) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _scoring(device: torch.device, gates, run) -> float:
    """Seconds inside the gates' own forward passes in one run."""
    if gates is None:
        return 0.0
    spent, begun = [0.0], [0.0]

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def before(*_) -> None:
        begun[0] = now()

    def after(*_) -> None:
        spent[0] += now() - begun[0]

    handles = [
        h for g in gates.gates for h in (g.register_forward_pre_hook(before), g.register_forward_hook(after))
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return spent[0]


def _peak(device: torch.device, run) -> int | None:
    """Bytes at the peak of a pass, less what was there before."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _flop(trained: TrainedRetention, config: RetentionConfig, length: int) -> float:
    shape = trained.model.config
    layers = shape.num_hidden_layers
    places = config.places(layers)
    budgets = [int(b) for b in token_budgets(config, torch.tensor([length]), len(places))]
    tokens, left = [], length
    for block in range(layers + 1):
        if block in places:
            left = min(left, budgets[places.index(block)])
        if block < layers:
            tokens.append(left)
    scored = [length][: len(places)] if config.method == "adaptive" else []
    inner = getattr(shape, "intermediate_size", None) or shape.hidden_dim
    windows = getattr(shape, "attention_window", None)
    return encoder_cost(
        tokens,
        shape.hidden_size,
        inner,
        shape.num_attention_heads,
        scored=scored,
        scorer_width=config.scorer_width,
        windows=windows,
    ).flop
