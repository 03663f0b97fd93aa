"""Whole training steps on random tokens: the shape of a run, with any vocabulary and number of ranks.

Weights are initialised as in training, but gates are fixed, so that a step costs as much as in a trained
model. The learning rate is 0. A step is timed as in a run: with compiled blocks, the optimiser, and the
reductions over ranks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acp_repro.attention import choose_implementation
from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.config import peak_flops
from acp_repro.pipeline.benchmark.attention import mean_gates
from acp_repro.pipeline.benchmark.baselines import official_model
from acp_repro.pipeline.benchmark.timing import ORDER, in_columns, interleaved, peak_memory
from acp_repro.pipeline.paper import samples, with_columns
from acp_repro.pipeline.provenance import device_name
from acp_repro.pipeline.training.distributed import parallelize, rank, world_size
from acp_repro.pipeline.training.run_folder import compiles
from acp_repro.pipeline.training.trainer import autocast, compiled_blocks, make_optimizer, train_step

from ..runs import PAPER_TOLERANCE, FoXRun
from ..task import pruned_ratio_per_layer


class Steps(NamedTuple):
    """One implementation with everything that a training step needs."""

    name: str
    model: nn.Module
    blocks: list[nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    set_tolerance: Callable[[float | None], None]
    compiled: bool


@with_columns(
    "implementation",
    "method",
    "vocab_size",
    "ranks",
    "parallel",
    "step_tokens",
    "steps",
    "repeats",
    *samples("step_ms"),
    "throughput_tokens_per_s",
    "mfu_nominal",
    "peak_memory_bytes",
    "pruned_ratio",
    "order",
)
def time_steps(
    run: FoXRun,
    vocab_size: int,
    device: torch.device,
    *,
    repeats: int,
    steps: int,
    official: bool,
    parallel: str = "auto",
    gates: str = "mixed",
) -> Iterator[dict[str, Any]]:
    """Yields one record per implementation, with ACP and exact, once measured; every rank yields all records.

    Each rank processes ``micro_batch_tokens`` per step. The times are ``repeats`` medians of ``steps`` steps,
    with interleaved methods. Memory is the peak of a rank, including weights and optimiser. ``official`` also
    times the authors' model, on one rank, without torch.compile, as in their trainer.
    """
    if parallel != "auto":
        run = dataclasses.replace(run, training=dataclasses.replace(run.training, parallel=parallel))
    tolerance = run.log_pruning_tolerance or PAPER_TOLERANCE
    config = dataclasses.replace(run.model_config(vocab_size), log_pruning_tolerance=tolerance)
    for make in (_ours, _official) if official else (_ours,):
        torch.manual_seed(run.seed)  # the same weights on every rank
        made = make(run, config, device)
        fix_gates(made.blocks, mean_gates(gates, config.num_heads, run.context_length, config.head_dim))
        yield from _time_steps(made, run, config, device, tolerance, repeats, steps)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time_steps(
    made: Steps,
    run: FoXRun,
    config: FoXConfig,
    device: torch.device,
    tolerance: float,
    repeats: int,
    steps: int,
) -> list[dict[str, Any]]:
    tokens, length = run.training.micro_batch_tokens, run.context_length
    batches = _random_batches(config.vocab_size, tokens // length, length, device)
    pruned = 0.0
    if made.name != "official":
        with torch.no_grad(), autocast(device, run.training.dtype):
            ratios = pruned_ratio_per_layer(made.model, next(batches)[0][:1])
        pruned = sum(ratios) / len(ratios)
    mode = run.parallel_mode(world_size())
    wrapped = parallelize(made.model, made.blocks, mode, device)
    optimizer = make_optimizer(made.model, run.training, learning_rate=0.0)
    peaks: dict[str, int | None] = {"acp": None, "exact": None}

    def take(method: str, count: int = steps) -> None:
        made.set_tolerance(tolerance if method == "acp" else None)
        for _ in range(count):
            train_step(
                wrapped,
                optimizer,
                made.loss,
                batches,
                1,
                max_grad_norm=run.training.max_grad_norm,
                dtype=run.training.dtype,
            )

    title = None if rank() > 0 else f"{run.name}, {config.vocab_size:,} words, {made.name} on {world_size()}"
    with compiled_blocks(made.blocks, made.compiled):
        calls = {method: functools.partial(take, method) for method in peaks}
        times = interleaved(calls, device, repeats, title=title)  # an untimed first call compiles
        if device.type == "cuda":
            for method in peaks:
                there = torch.cuda.memory_allocated(device)  # weights and optimiser states
                peaks[method] = there + peak_memory(functools.partial(take, method, 1), device)
    peak_rate = peak_flops(device_name(device), run.training.dtype)
    flops = config.flops_per_token(length)
    return [
        {
            "implementation": made.name,
            "method": method,
            "architecture": run.architecture,
            "size": run.size_name,
            "context_length_tokens": length,
            "vocab_size": config.vocab_size,
            "ranks": world_size(),
            "parallel": mode,
            "step_tokens": tokens * world_size(),
            "steps": steps,
            "repeats": len(values),
            "order": ORDER,
            **in_columns(step=[ms / steps for ms in values]),
            "throughput_tokens_per_s": (rate := 1e3 * tokens * world_size() * steps / median(values)),
            "mfu_nominal": peak_rate and rate * flops / (peak_rate * world_size()),
            "peak_memory_bytes": peaks[method],
            "pruned_ratio": pruned if method == "acp" and made.name != "official" else None,
        }
        for method, values in times.items()
    ]


def fix_gates(blocks: list[nn.Module], log_gates: Tensor) -> None:
    """Sets the gates of every block to one value per head, (H,)."""
    for block in blocks:
        gate = block.attn.fgate_proj
        with torch.no_grad():
            gate.weight.zero_()
            gate.bias.copy_(log_gates.double().exp().logit())


def _random_batches(
    vocab_size: int, rows: int, length: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(device).manual_seed(rank())
    ids = torch.randint(vocab_size, (rows, length + 1), generator=generator, device=device)
    return itertools.repeat((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def _ours(run: FoXRun, config: FoXConfig, device: torch.device) -> Steps:
    model = FoXForCausalLM(config, run.training.gradient_checkpointing).to(device)
    return Steps(
        choose_implementation(device),
        model,
        list(model.model.layers),
        lambda model, input_ids, labels: model(input_ids, labels=labels).mean(),
        model.set_log_pruning_tolerance,
        compiles(run, device),
    )


def _official(run: FoXRun, config: FoXConfig, device: torch.device) -> Steps:
    assert world_size() == 1, "the authors' model is compared on one rank"
    model = official_model(config)
    if run.training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model = model.to(device).train()
    layers = list(model.model.layers)

    def set_tolerance(value: float | None) -> None:
        for layer in layers:
            layer.attn.log_pruning_tolerance = value

    return Steps(
        "official",
        model,
        layers,
        lambda model, input_ids, labels: model(input_ids=input_ids, labels=labels).loss.mean(),
        set_tolerance,
        compiled=False,
    )
