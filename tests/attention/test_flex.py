"""``as_flex`` against ``forgetting_attention``: values, and the blocks that FlexAttention visits."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from acp_repro.attention import as_flex, forgetting_attention

from .budgets import make_inputs

OPTIONS = [
    {},
    {"window_size": 100},
    {"log_pruning_tolerance": -10.0, "logit_bound": 6.0},
    {"log_pruning_tolerance": -10.0, "logit_bound": 6.0, "window_size": 150},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "window", "ACP", "ACP and window"])
@pytest.mark.parametrize("length", [1, 65, 320])
def test_flex_computes_forgetting_attention(options, length):
    q, k, v, gates, _ = make_inputs(length, length, 2, 2, batch=2, device="cpu")
    expected, start = forgetting_attention(
        q, k, v, gates, head_first=True, return_start_index=True, **options
    )
    score_mod, block_mask = as_flex(gates, head_first=True, block_size=64, **options)
    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # Compiled Flex visits all blocks from the boundary to the diagonal.
    n = torch.arange(start.shape[-1])
    assert torch.equal(block_mask.to_dense().bool(), (n >= start[..., None]) & (n <= n[:, None]))
    if length == 320 and "logit_bound" in options:
        assert start[:, 0].any(), "the case prunes nothing"


@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "window", "ACP", "ACP and window"])
@pytest.mark.parametrize("grid", [(64, 64), (128, 32), (32, 128)])
def test_full_blocks_have_no_masked_entries(options, grid):
    gates = make_inputs(320, 320, 2, 2, batch=2, device="cpu")[3]
    _, mask = as_flex(gates, head_first=True, block_size=grid, **options)
    kept = create_block_mask(mask.mask_mod, 2, 2, 320, 320, device="cpu", BLOCK_SIZE=grid)
    for count, indices, other_count, other_indices in (
        (mask.kv_num_blocks, mask.kv_indices, kept.kv_num_blocks, kept.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices, kept.full_kv_num_blocks, kept.full_kv_indices),
    ):
        assert torch.equal(count, other_count)
        chosen = torch.arange(indices.shape[-1]) < count[..., None]
        assert torch.equal(indices[chosen], other_indices[chosen])
