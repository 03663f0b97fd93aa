"""One decoding step of attention alone or of a whole model (`scope`); what it keeps for each head, and what a
block table shared by a layer's heads would keep."""

from __future__ import annotations

from acp_repro.chain.paper import Quantity

QUANTITY = Quantity(
    "decode_time",
    "scope implementation method gates batch length_tokens layers heads head_dim repeats step_ms "
    "read_ms prefill_ms kept_bytes layer_kept_bytes allocated_bytes peak_bytes output_error "
    "order",
    timed=True,
    later=("order",),
    command="python -m acp_repro.benchmark_decode --suite {suite}",
)
