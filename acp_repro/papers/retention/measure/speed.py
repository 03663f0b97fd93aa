"""Time, throughput, memory and FLOPs of inference and training, with gates and without."""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from acp_repro.pipeline.benchmark.timing import ORDER, in_columns, interleaved, peak_memory, wall_ms
from acp_repro.pipeline.paper import samples, with_columns
from acp_repro.pipeline.training.task import Trained
from acp_repro.pipeline.training.trainer import autocast
from acp_repro.retention import RetentionConfig, encoder_cost, token_budgets

from ..backbones import untrained
from ..schema import SPECIAL

Step = Callable[[], None]
BATCH_EXAMPLES = 32  # as in Table 4
_BUSY = 8192  # rows and columns of a matrix whose product takes at least a millisecond on a GPU


@with_columns(
    "length_tokens",
    "batch_examples",
    "repeats",
    *samples("batch_ms"),
    *samples("dense_batch_ms"),
    "scorer_ms",
    "throughput_tokens_per_s",
    "dense_throughput_tokens_per_s",
    "peak_memory_bytes",
    "dense_peak_memory_bytes",
    "training_batch_examples",
    *samples("training_batch_ms"),
    *samples("dense_training_batch_ms"),
    "training_peak_memory_bytes",
    "dense_training_peak_memory_bytes",
    "example_flop",
    "dense_example_flop",
    "order",
)
def measure_speed(trained: Trained) -> list[dict[str, Any]]:
    """One record for each length, from full batches of random tokens; times are medians.

    Inference uses weights in the run's dtype. Training is a forward and a backward pass with soft gates under
    autocast, and is missing if it runs out of memory. Memory is the peak of a pass without weights and
    gradients, and is missing on a CPU.
    """
    if trained.model is None:
        trained = dataclasses.replace(trained, model=untrained(trained.run).to(trained.device))
    settings, longest = trained.measure_settings, trained.run.dataset.max_tokens
    lengths = sorted({min(length, longest) for length in settings.speed_lengths_tokens})
    return [_at(trained, length) for length in lengths]


def _at(trained: Trained, length: int) -> dict[str, Any]:
    settings = trained.measure_settings
    rows = BATCH_EXAMPLES
    if settings.speed_batch_tokens is not None:
        rows = max(1, settings.speed_batch_tokens // length)
    generator = torch.Generator().manual_seed(0)
    vocabulary = trained.model.config.vocab_size
    ids = torch.randint(len(SPECIAL), vocabulary, (rows, length), generator=generator)
    ids = ids.to(trained.device)
    gates = getattr(trained.model, "retention", None)
    config = gates.config if gates is not None else RetentionConfig(1.0, method="dense")
    return (
        {"length_tokens": length, "batch_examples": rows, "order": ORDER}
        | _inference(trained, ids)
        | _training(trained, ids)
        | {
            "example_flop": _flop(trained, config, length),
            "dense_example_flop": _flop(trained, RetentionConfig(1.0, method="dense"), length),
        }
    )


@torch.no_grad()
def _inference(trained: Trained, ids: Tensor) -> dict[str, Any]:
    model = trained.model.eval()
    if trained.run.training.dtype == "bfloat16":
        model = copy.deepcopy(model).bfloat16()
    gates = getattr(model, "retention", None)

    def run() -> None:
        model(input_ids=ids)

    repeats, dense = trained.measure_settings.timing_repeats, _without(gates, run)
    times = interleaved({"ours": run, "dense": dense}, trained.device, repeats, wall_ms)
    # Not interleaved with the calls above, because the work that keeps a GPU busy would slow the next call.
    scoring = median(_scoring_ms(trained.device, gates, run) for _ in range(repeats))
    memory, dense_memory = _peak(trained.device, run), _peak(trained.device, dense)
    ours, plain = median(times["ours"]), median(times["dense"])
    return {
        "repeats": len(times["ours"]),
        **in_columns(batch=times["ours"], dense_batch=times["dense"]),
        "scorer_ms": scoring,
        "throughput_tokens_per_s": 1e3 * ids.numel() / ours,
        "dense_throughput_tokens_per_s": 1e3 * ids.numel() / plain,
        "peak_memory_bytes": memory,
        "dense_peak_memory_bytes": dense_memory,
    }


def _training(trained: Trained, ids: Tensor) -> dict[str, Any]:
    """A training pass with soft gates (of a baseline, with its removal), and the dense pass."""
    run, model = trained.run, copy.deepcopy(trained.model).train()
    gates = getattr(model, "retention", None)
    if gates is not None:
        gates.configure(open_steps=0, hard_from_step=None)
    if trained.measure_settings.speed_batch_tokens is None:
        ids = ids[: run.dataset.micro_batch_examples or run.dataset.batch_examples]
    labels = {"labels": torch.zeros(len(ids), dtype=torch.long, device=ids.device)}
    if hasattr(model, "qa_outputs"):
        labels = {"start_positions": labels["labels"], "end_positions": labels["labels"]}

    def step() -> None:
        with autocast(trained.device, run.training.dtype):
            loss = model(input_ids=ids, **labels).loss
        loss.backward()
        if gates is not None:
            gates.take_violation()

    dense = _without(gates, step)
    try:
        repeats = trained.measure_settings.timing_repeats
        times = interleaved({"ours": step, "dense": dense}, trained.device, repeats, wall_ms)
        memory, dense_memory = _peak(trained.device, step), _peak(trained.device, dense)
    except torch.cuda.OutOfMemoryError:
        times, memory, dense_memory = {"ours": [], "dense": []}, None, None
    return {
        "training_batch_examples": len(ids),
        **in_columns(training_batch=times["ours"], dense_training_batch=times["dense"]),
        "training_peak_memory_bytes": memory,
        "dense_training_peak_memory_bytes": dense_memory,
    }


def _without(gates: nn.Module | None, run: Step) -> Step:
    """``run`` with disabled gates, which is the dense model."""

    def dense() -> None:
        with gates.disabled() if gates is not None else contextlib.nullcontext():
            run()

    return dense


def _scoring_ms(device: torch.device, gates: nn.Module | None, run: Step) -> float:
    """The milliseconds of the gates' forward passes in one run, by the device's clock on a GPU.

    Other work is queued first, so that the GPU is busy while the host launches the kernels of the gates.
    Otherwise the measured time would include the launch latency at the start of a run.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        busy = torch.empty(_BUSY, _BUSY, dtype=torch.bfloat16, device=device)
        for _ in range(16):
            torch.mm(busy, busy)
    marks: list[Any] = []

    def mark(*_) -> None:
        if on_gpu:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    with contextlib.ExitStack() as hooks:
        for gate in gates.gates if gates is not None else ():
            hooks.enter_context(gate.register_forward_pre_hook(mark))
            hooks.enter_context(gate.register_forward_hook(mark))
        run()
    pairs = zip(marks[::2], marks[1::2], strict=True)
    if on_gpu:
        torch.cuda.synchronize()
        return sum(a.elapsed_time(b) for a, b in pairs)
    return 1e3 * sum(b - a for a, b in pairs)


def _peak(device: torch.device, run: Step) -> int | None:
    return peak_memory(run, device) if device.type == "cuda" else None


def _flop(trained: Trained, config: RetentionConfig, length: int) -> float:
    shape = trained.model.config
    layers = shape.num_hidden_layers
    places = config.places(layers)
    budgets = dict(zip(places, token_budgets(config, length, len(places)), strict=False))
    tokens, left = [], length
    for block in range(layers):
        left = min(left, budgets.get(block, length))
        tokens.append(left)
    scored = [length][: len(places)] if config.method == "adaptive" else []
    inner = getattr(shape, "intermediate_size", None) or shape.hidden_dim
    windows = getattr(shape, "attention_window", None)
    return encoder_cost(
        tokens, shape.hidden_size, inner, scored=scored, scorer_width=config.scorer_width, windows=windows
    ).flop
