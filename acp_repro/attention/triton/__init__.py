"""Forgetting attention on any GPU that Triton supports, with separate kernels for Hopper.

The functions below are the whole interface; :mod:`.dispatch` contains the two passes.
"""

from __future__ import annotations

from .decode import decode
from .dispatch import backward, backward_pass, forward, forward_pass, why_portable
from .gates import cumulative_log_fgate, find_boundary, log_fgate_grad
from .launch import repeat_launches
from .norms import threshold_from_norms
from .paged_write import write_kvcache

__all__ = [
    "backward",
    "backward_pass",
    "cumulative_log_fgate",
    "decode",
    "find_boundary",
    "forward",
    "forward_pass",
    "log_fgate_grad",
    "repeat_launches",
    "threshold_from_norms",
    "why_portable",
    "write_kvcache",
]
