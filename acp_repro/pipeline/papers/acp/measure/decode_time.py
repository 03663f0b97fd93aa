"""One decoding step of attention alone or of a whole model (`scope`), and the memory of its cache.

The cache is measured as it is, for each head, and as one block table for all heads of a layer would hold it.
"""

from __future__ import annotations

from acp_repro.pipeline.paper import Quantity

QUANTITY = Quantity(
    "decode_time",
    "scope implementation method gates batch length_tokens layers heads head_dim repeats step_ms "
    "read_ms prefill_ms kept_bytes layer_kept_bytes allocated_bytes peak_bytes output_error "
    "order",
    timed=True,
    key="scope implementation method batch length_tokens heads head_dim",
    command="python -m acp_repro.benchmark_decode --suite {suite}",
)
