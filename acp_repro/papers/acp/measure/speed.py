"""Attention time and training throughput of a trained model with and without ACP (Figure 2, Table 4)."""

import functools
from collections import defaultdict
from statistics import median
from typing import Any

import torch

from acp_repro.attention import choose_implementation, forgetting_attention
from acp_repro.common.command import progress_bar
from acp_repro.model.capture import AttentionInputs, attention_inputs
from acp_repro.pipeline.benchmark.timing import ORDER, in_columns, interleaved
from acp_repro.pipeline.paper import samples, with_columns
from acp_repro.pipeline.training.run_folder import compiles
from acp_repro.pipeline.training.trainer import autocast, compiled_blocks, make_optimizer, train_step

from ..trained import TrainedFoX

METHODS, PARTS = ("acp", "exact"), ("forward", "backward")
_THROUGHPUT = (
    "implementation",
    "method",
    "measured_tokens",
    "repeats",
    "throughput_tokens_per_s",
    *samples("pass_ms"),
    "order",
)


@with_columns(
    "implementation",
    "method",
    "measured_tokens",
    "repeats",
    *samples("forward_ms"),
    *samples("backward_ms"),
    "boundary_search_ms",
    "order",
)
def measure_attention_time(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method: milliseconds of all layers on the measured text (Appendix B), as a sum of
    medians. The forward time includes the boundary search."""
    batches = list(trained.heldout_batches(trained.measure_settings.timing_tokens))
    each: defaultdict = defaultdict(list)
    calls = len(batches) * trained.model.config.num_hidden_layers
    progress = progress_bar(total=calls, desc=f"{trained.run.name}: attention time", unit="layer")
    with progress, autocast(trained.device, trained.run.training.dtype):
        for input_ids, _ in batches:
            for inputs in attention_inputs(trained.model, input_ids):
                times = _times(inputs, trained.device, trained.measure_settings.timing_repeats)
                for key, values in times.items():
                    each[key].append(values)
                progress.update()
    return [
        {
            "implementation": choose_implementation(trained.device),
            "method": method,
            "measured_tokens": sum(input_ids.numel() for input_ids, _ in batches),
            "repeats": len(times["forward", method]),
            "order": ORDER,
            **in_columns(**{part: list(map(sum, zip(*each[part, method], strict=True))) for part in PARTS}),
            **{f"{part}_ms": sum(map(median, each[part, method])) for part in PARTS},
            "boundary_search_ms": sum(map(median, each["search", "acp"])) if method == "acp" else None,
        }
        for method in METHODS
    ]


def _times(inputs: AttentionInputs, device: torch.device, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of one layer by part (``forward``, ``backward``, ``search``) and method."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.log_fgate)]

    def forward(method: str) -> torch.Tensor:
        threshold = inputs.threshold if method == "acp" else None
        return forgetting_attention(*leaves, head_first=True, adaptive_threshold=threshold)

    outs = {method: forward(method) for method in METHODS}
    dout = torch.randn_like(outs["exact"])

    def backward(method: str) -> None:
        torch.autograd.grad(outs[method], leaves, dout, retain_graph=True)

    # Parts are timed separately, so that each method is preceded only by the other method.
    parts = {"forward": forward, "backward": backward}
    times = {
        (name, method): values
        for name, part in parts.items()
        for method, values in interleaved(
            {method: functools.partial(part, method) for method in METHODS}, device, repeats
        ).items()
    }
    return times | interleaved({("search", "acp"): inputs.search}, device, repeats)


@with_columns(*_THROUGHPUT)
def measure_throughput(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each method: tokens per second of whole training steps with the final weights.

    A learning rate of 0 preserves the weights, because throughput drops while gates open and then remains
    constant (Section 4.1). The untimed warm-up compiles.
    """
    run, config = trained.run, trained.run.training
    batches = list(trained.heldout_batches(trained.measure_settings.timing_tokens))
    tokens = sum(input_ids.numel() for input_ids, _ in batches)
    optimizer = make_optimizer(trained.model, config, learning_rate=0.0)
    tolerance = trained.model.config.log_pruning_tolerance

    def steps(tolerance: float | None) -> None:
        trained.model.set_log_pruning_tolerance(tolerance)
        for batch in batches:
            train_step(
                trained.model,
                optimizer,
                trained.task.loss,
                iter([batch]),
                1,
                max_grad_norm=config.max_grad_norm,
                dtype=config.dtype,
            )

    calls = {"acp": functools.partial(steps, tolerance), "exact": functools.partial(steps, None)}
    with compiled_blocks(trained.task.blocks(trained.model), compiles(run, trained.device)):
        title = f"{run.name}: training throughput"
        times = interleaved(calls, trained.device, trained.measure_settings.timing_repeats, title=title)
    trained.model.set_log_pruning_tolerance(tolerance)
    return [
        {
            "implementation": choose_implementation(trained.device),
            "method": method,
            "measured_tokens": tokens,
            "repeats": len(values),
            "order": ORDER,
            "throughput_tokens_per_s": tokens / (median(values) / 1e3),
            **in_columns(**{"pass": values}),
        }
        for method, values in times.items()
    ]


@with_columns(*_THROUGHPUT)
def measure_throughput_with_checkpointing(trained: TrainedFoX) -> list[dict[str, Any]]:
    """:func:`measure_throughput` with gradient checkpointing, as the paper trains (Appendix B)."""
    before = trained.model.gradient_checkpointing
    trained.model.gradient_checkpointing = True
    try:
        return measure_throughput(trained)
    finally:
        trained.model.gradient_checkpointing = before
