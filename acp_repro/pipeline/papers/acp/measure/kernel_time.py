"""Speed of the kernels and of their rivals, for a whole suite; nominal counts the whole causal grid."""

from __future__ import annotations

from acp_repro.pipeline.paper import Quantity

QUANTITY = Quantity(
    "kernel_time",
    "implementation method gates length_tokens heads head_dim measured_tokens repeats "
    "pruned_ratio forward_ms forward_backward_ms search_ms nominal_forward_tflop "
    "nominal_forward_backward_tflop gate_gradient_error forward_host_ms forward_backward_host_ms "
    "order",
    timed=True,
    key="implementation method length_tokens heads head_dim",
    command="python -m acp_repro.benchmark_attention --suite {suite}",
)
