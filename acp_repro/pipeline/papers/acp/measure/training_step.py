"""Whole training steps on one and several GPUs, for a whole suite."""

from __future__ import annotations

from acp_repro.pipeline.paper import Quantity

QUANTITY = Quantity(
    "training_step",
    "implementation method vocab_size ranks parallel step_tokens steps repeats step_ms "
    "throughput_tokens_per_s mfu_nominal peak_memory_bytes pruned_ratio order",
    timed=True,
    key="architecture size context_length_tokens implementation method vocab_size ranks parallel",
    command="python -m acp_repro.benchmark_training --suite {suite}",
)
