"""The explorer's sums on a GPU against the CPU in float64."""

import pytest
import torch

from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.explorer.weights import cell_tokens, head_weights

pytestmark = pytest.mark.gpu
GRID, DELTA = (128, 64), torch.tensor(-40.0)


def made(length, gate):
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(length, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    log_fgate = torch.nn.functional.logsigmoid(gate + torch.randn(length, generator=generator).double())
    return q, k, cumulative_log_fgate(log_fgate)


@pytest.mark.parametrize("gate", [-3.0, 3.0, 9.0])
def test_sums_match_the_cpu(gate):
    length = 2500
    q, k, c = made(length, gate)
    settings = {"grid": GRID, "cell": cell_tokens(length)}
    expected = head_weights(q, k, c, DELTA, **settings)
    found = head_weights(
        *(x.float().cuda() for x in (q, k)), c.cuda(), DELTA.cuda(), chunk_scores=length * 512, **settings
    )
    assert torch.equal(found.boundary.cpu(), expected.boundary)
    assert torch.equal(found.first_kept.cpu(), expected.first_kept)
    for name in ("weights", "pruned_mass", "cells", "by_distance", "received"):
        value = getattr(found, name).double().cpu()
        torch.testing.assert_close(value, getattr(expected, name).double(), rtol=2e-4, atol=1e-6)
