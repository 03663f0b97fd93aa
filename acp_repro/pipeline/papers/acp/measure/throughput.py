"""Training throughput with and without ACP, from a trained model's weights (Figure 2, bottom)."""

from __future__ import annotations

import functools
from statistics import median
from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

if TYPE_CHECKING:
    from ..trained import TrainedFoX


def measure(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record a method: tokens a second of whole training steps, optimiser included.

    The final weights are used because throughput drops while gates open and then stays constant (Section
    4.1). A learning rate of 0 keeps them unchanged. Both methods take turns. Blocks are compiled if training
    compiles them, in the first turn, which does not count.
    """
    from acp_repro.attention import choose_implementation
    from acp_repro.model.layers import fuse_training
    from acp_repro.pipeline.benchmark.timing import ORDER, interleaved
    from acp_repro.pipeline.training.optimizer import make_optimizer
    from acp_repro.pipeline.training.run_folder import compiles
    from acp_repro.pipeline.training.step import compiled_blocks, train_step

    run, config = trained.run, trained.run.training
    batches = list(trained.heldout_batches(trained.measure_settings.timing_tokens))
    tokens = sum(input_ids.numel() for input_ids, _ in batches)
    optimizer = make_optimizer(trained.model, config, learning_rate=0.0)
    fuse_training(trained.model)
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
        }
        for method, values in times.items()
    ]


QUANTITY = Quantity(
    "throughput",
    "implementation method measured_tokens repeats throughput_tokens_per_s order",
    measure,
    lambda suite: suite.select(acp=True),
    group="speed",
    timed=True,
    later=("order",),
)
