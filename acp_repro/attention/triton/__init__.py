"""Forgetting attention on any GPU that Triton supports; Hopper has a backward of its own.

Tensors are (B, H, T, D). The functions below are the whole interface; `acp_repro.attention` calls
them from its custom operator.
"""

from .backward import backward, why_portable
from .decode import decode
from .forward import forward
from .gates import cumulative_log_fgate, log_fgate_grad
from .norms import largest_norms, threshold_from_norms
from .paged_write import write_blocks, write_kvcache
from .passes import backward_pass, forward_pass
from .search import find_boundary
from .tiles import block_sizes

__all__ = [
    "backward",
    "backward_pass",
    "block_sizes",
    "cumulative_log_fgate",
    "decode",
    "find_boundary",
    "forward",
    "forward_pass",
    "largest_norms",
    "log_fgate_grad",
    "threshold_from_norms",
    "why_portable",
    "write_blocks",
    "write_kvcache",
]
